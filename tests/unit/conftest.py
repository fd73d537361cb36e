"""Beside this file lie the helpers that several rooms of the unit tests share; by it they can be imported."""
