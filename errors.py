"""What the user can mend. Imports nothing, so that worker processes start at once."""


class UserError(Exception):
    """Something the user can mend. Its text is what they read: what is wrong, with the values involved, and the remedy.

    Several problems found together are raised together, one a line.
    """

    is_said = False  # by another process
