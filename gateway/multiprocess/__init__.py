"""Several serving processes that share the same ports, and their supervisor.

supervisor        starts, restarts, reloads and stops the processes; reserves their ports
process           one serving process
serving_process   the same, as the supervisor sees it
ipc               messages between the supervisor and a process
partition         each process's part of the configured limits
admin_proxy       one admin listener for all processes
merged_responses  merges their metrics and status
"""
