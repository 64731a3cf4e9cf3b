"""`corpus-client doctor`: is everything as it should be, and is data the bottleneck?"""
