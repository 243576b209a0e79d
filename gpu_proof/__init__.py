"""What stands in for a GPU, without which no user of train_gpt.py needs it: README.md beside this file.

Reading order: pretend_gpu (a process believes in a GPU), gpu_graphs (what the compiler makes for it), roofline (how
long that takes), interpret and gpu_numbers (what its kernels compute).
"""
