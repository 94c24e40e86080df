"""What tests of several folders share: scripted servers, models, a node in a thread, the number of examples."""
