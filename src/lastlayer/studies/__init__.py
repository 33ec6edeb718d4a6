"""Jobs that show the library at work on built-in data. They call the rooms and have no numerics of their own."""
