"""The message schema as Arrow has it, on disk and on the wire: self-validating batches, rows before they are appended
to a log.
"""
