"""Tables of API facts, one a target, read by tpumigrate.tables."""
