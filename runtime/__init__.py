"""What runs inside the user's own program.  Imports neither click nor rich, and torch only when asked to."""
