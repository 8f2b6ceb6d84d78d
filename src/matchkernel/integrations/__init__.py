"""The library inside other people's: each file needs what it integrates with, and says so when it is missing."""
