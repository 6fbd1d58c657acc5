"""The columnar reader for Spark: the tests of the Python source again, with the jar on the class path, and its own."""
