"""`alkstore demo`: the library's main job on real input, with a crash in the middle, and the books checked at the end.

A surface: own processes, an HTTP receiver, a table of its own. Nothing else in the library knows of it.
"""
