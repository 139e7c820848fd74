"""What torch's process groups over gloo do now and then, and no test of fastdp answers for."""

# A process that has done its work, printed it and left its group aborts while it ends: a thread of
# gloo lets go of a tensor when the interpreter is gone already (torch 2.11 and 2.13).
AT_EXIT = "terminate called without an active exception"
