"""`trainkit check`: is a window of this training the big batch?"""
