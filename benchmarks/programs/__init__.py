"""Programs of other people that train with Lightning: ``make programs``. One file makes one program's project."""
