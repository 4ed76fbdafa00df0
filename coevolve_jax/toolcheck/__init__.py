"""Checks whether an environment's tools are fit to train on, by exploring them: experiments/check_tools.py.

facts.py     plays the tools and writes down what happened
lines.py     reads the user's file, without executing it, for the lines to name
findings.py  says what is wrong, where, and what to do
page.py      shows all of it as a page
"""
