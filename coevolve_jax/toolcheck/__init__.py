"""Checks whether an environment's tools are fit to train on, by exploring them: experiments/check_tools.py.

facts.py     plays the tools and writes down what happened
servers.py   looks into the folders of a server's worlds
lines.py     reads the user's file, without executing it, for the lines to name
findings.py  says what is wrong and where
remedies.py  says what to do, with a class of one's own or with a server
page.py      shows all of it as a page
"""
