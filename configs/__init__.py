"""The shipped YAML files, installed with the package."""
