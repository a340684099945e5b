"""What the notebooks need besides the package: small experiments, and pictures of them.

The cells of a notebook are for reading, so what is not worth reading there is here. Needs the packages of
the extra ``notebooks``.
"""
