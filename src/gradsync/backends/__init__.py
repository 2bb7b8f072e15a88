"""What carries calls out: the waist (``Backend.submit``) and the engines below it."""
