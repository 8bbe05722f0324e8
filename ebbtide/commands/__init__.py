"""The commands of the ``ebbtide`` command line: the only modules that may see every floor."""
