//! Runnable training programs: train_diloco and train_ddp.
