"""``python -m lightning_odc``: the same as the command ``lightning-odc``."""

from lightning_odc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
