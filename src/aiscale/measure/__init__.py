"""What a training script does, measured from outside, without a change to it."""
