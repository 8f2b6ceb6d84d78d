"""Theory behind the scores: derivations that run, and the numbers they predict.

`matchkernel` itself needs torch alone. The derivations here also need sympy (the `book` extra), and import it only when
they are called; the functions that predict numbers do not.
"""
