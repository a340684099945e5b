"""What experiments share: workloads, ranks in processes, measurements, and what they say."""
