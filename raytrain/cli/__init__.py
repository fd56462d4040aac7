"""Command lines: of `raytrain` itself, and the parser that job scripts share with it."""
