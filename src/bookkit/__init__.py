"""What the book's chapters and its checks share, and the library must not carry. Not part of the wheel."""
