//! oxccl: fault-tolerant collectives and low-communication training. The facade and the command.
