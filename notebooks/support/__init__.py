"""What the notebooks need besides the package: small experiments, and pictures of them.

The cells of a notebook are for reading. Here is what a reader need not see. It needs the packages of the extra
``notebooks``. A notebook imports it as ``support``: the folder stands beside it, and is no part of the package.
"""
