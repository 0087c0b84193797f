"""The rules, one module a family; tpumigrate.registry finds them by themselves."""
