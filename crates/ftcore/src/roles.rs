//! Which tensors of a collective are read and which are written, and the same collective over other tensors.
//!
//! For code that carries a collective over to other memory: staging through the host, another process, a plugin.

use crate::{Collective, DType, Result, Tensor};

/// What an operation does with a tensor on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read only.
    Input,
    /// Written as a whole; what was in it does not matter.
    Output,
    /// Read and written.
    InOut,
}

impl Role {
    /// True if the operation reads it.
    pub fn is_read(self) -> bool {
        self != Self::Output
    }

    /// True if the operation writes it.
    pub fn is_written(self) -> bool {
        self != Self::Input
    }
}

impl Collective {
    /// The role of each tensor on `rank`, in the order of [`tensors`](Self::tensors).
    pub fn roles(&self, rank: u32) -> Vec<Role> {
        let mut roles = Vec::new();
        // Only asks: nothing is made.
        let _ = self.with_tensors(rank, &mut |_, role| {
            roles.push(role);
            Ok(Tensor::zeros(DType::U8, 0))
        });
        roles
    }

    /// The same operation over the tensors that `make` gives for this one's, called in the order of
    /// [`tensors`](Self::tensors) with each one's role on `rank`. The first error of `make` ends it.
    pub fn with_tensors(
        &self,
        rank: u32,
        make: &mut dyn FnMut(&Tensor, Role) -> Result<Tensor>,
    ) -> Result<Self> {
        use Role::{InOut, Input, Output};
        fn all(
            list: &[Tensor],
            role: Role,
            make: &mut dyn FnMut(&Tensor, Role) -> Result<Tensor>,
        ) -> Result<Vec<Tensor>> {
            list.iter().map(|t| make(t, role)).collect()
        }
        let of_root = |root: u32, there: Role, elsewhere: Role| if rank == root { there } else { elsewhere };
        Ok(match self {
            Self::AllReduce { tensors, op } => Self::AllReduce {
                tensors: all(tensors, InOut, make)?,
                op: *op,
            },
            Self::Broadcast { tensors, root } => Self::Broadcast {
                tensors: tensors
                    .iter()
                    .map(|t| match (rank == *root, t.dtype()) {
                        // Backends make bools canonical, the root's too (L16).
                        (true, DType::Bool) => make(t, InOut),
                        (true, _) => make(t, Input),
                        (false, _) => make(t, Output),
                    })
                    .collect::<Result<_>>()?,
                root: *root,
            },
            Self::Reduce { tensor, op, root } => Self::Reduce {
                tensor: make(tensor, of_root(*root, InOut, Input))?,
                op: *op,
                root: *root,
            },
            Self::AllGather { input, outputs } => Self::AllGather {
                input: make(input, Input)?,
                outputs: all(outputs, Output, make)?,
            },
            Self::AllGatherInto { pairs } => Self::AllGatherInto {
                pairs: pairs
                    .iter()
                    .map(|(i, o)| Ok((make(i, Input)?, make(o, Output)?)))
                    .collect::<Result<_>>()?,
            },
            Self::AllGatherInPlace { tensors } => Self::AllGatherInPlace {
                tensors: all(tensors, InOut, make)?,
            },
            Self::Gather { input, outputs, root } => Self::Gather {
                input: make(input, Input)?,
                outputs: all(outputs, Output, make)?,
                root: *root,
            },
            Self::Scatter { inputs, output, root } => Self::Scatter {
                inputs: all(inputs, Input, make)?,
                output: make(output, Output)?,
                root: *root,
            },
            Self::ReduceScatter { inputs, output, op } => Self::ReduceScatter {
                inputs: all(inputs, Input, make)?,
                output: make(output, Output)?,
                op: *op,
            },
            Self::ReduceScatterInto { pairs, op } => Self::ReduceScatterInto {
                pairs: pairs
                    .iter()
                    .map(|(i, o)| Ok((make(i, Input)?, make(o, Output)?)))
                    .collect::<Result<_>>()?,
                op: *op,
            },
            Self::ReduceScatterInPlace { tensors, op } => Self::ReduceScatterInPlace {
                tensors: all(tensors, InOut, make)?,
                op: *op,
            },
            Self::AllToAll { inputs, outputs } => Self::AllToAll {
                inputs: all(inputs, Input, make)?,
                outputs: all(outputs, Output, make)?,
            },
            Self::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            } => Self::AllToAllInto {
                input: make(input, Input)?,
                output: make(output, Output)?,
                input_splits: input_splits.clone(),
                output_splits: output_splits.clone(),
            },
            Self::Send { tensor, peer, tag } => Self::Send {
                tensor: make(tensor, Input)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Recv { tensor, peer, tag } => Self::Recv {
                tensor: make(tensor, Output)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Barrier => Self::Barrier,
            Self::MonitoredBarrier { wait_all } => Self::MonitoredBarrier { wait_all: *wait_all },
            Self::Batch { ops } => Self::Batch {
                ops: ops
                    .iter()
                    .map(|op| op.with_tensors(rank, make))
                    .collect::<Result<_>>()?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    fn t(n: usize) -> Tensor {
        Tensor::from_vec(vec![0f32; n])
    }

    /// The roles of `op` on `rank`, having checked that the copy has the same fingerprint and tensors.
    fn roles(op: &Collective, rank: u32) -> Vec<Role> {
        let mut roles = Vec::new();
        let mut counts = Vec::new();
        let copy = op
            .with_tensors(rank, &mut |tensor, role| {
                roles.push(role);
                counts.push(tensor.count());
                Ok(Tensor::zeros(tensor.dtype(), tensor.count()))
            })
            .unwrap();
        assert_eq!(copy.fingerprint(), op.fingerprint());
        let shown: Vec<usize> = op.tensors().iter().map(|t| t.count()).collect();
        assert_eq!(counts, shown, "in the order of tensors()");
        assert_eq!(op.roles(rank), roles);
        roles
    }

    #[test]
    fn roles_follow_the_operation_and_the_root() {
        use Role::{InOut, Input, Output};
        let sum = ReduceOp::Sum;
        let broadcast = Collective::Broadcast {
            tensors: vec![t(1), t(2)],
            root: 1,
        };
        assert_eq!(roles(&broadcast, 1), [Input, Input]);
        assert_eq!(roles(&broadcast, 0), [Output, Output]);
        let bools = Collective::Broadcast {
            tensors: vec![Tensor::zeros(DType::Bool, 1)],
            root: 1,
        };
        assert_eq!((roles(&bools, 1), roles(&bools, 0)), (vec![InOut], vec![Output]));
        let reduce = Collective::Reduce {
            tensor: t(3),
            op: sum,
            root: 0,
        };
        assert_eq!((roles(&reduce, 0), roles(&reduce, 2)), (vec![InOut], vec![Input]));
        let pairs = vec![(t(2), t(4)), (t(3), t(6))];
        let gather = Collective::AllGatherInto { pairs };
        assert_eq!(roles(&gather, 0), [Input, Output, Input, Output]);
        let gather = Collective::AllGatherInPlace {
            tensors: vec![t(4), t(6)],
        };
        assert_eq!(roles(&gather, 1), [InOut, InOut]);
        let scatter = Collective::ReduceScatterInPlace {
            tensors: vec![t(4)],
            op: sum,
        };
        assert_eq!(roles(&scatter, 1), [InOut]);
        let batch = Collective::Batch {
            ops: vec![
                Collective::Send {
                    tensor: t(1),
                    peer: 1,
                    tag: 0,
                },
                Collective::Recv {
                    tensor: t(2),
                    peer: None,
                    tag: 0,
                },
            ],
        };
        assert_eq!(roles(&batch, 0), [Input, Output]);
        let all = Collective::AllReduce {
            tensors: vec![t(1)],
            op: sum,
        };
        assert_eq!(roles(&all, 0), [InOut]);
        let e = all.with_tensors(0, &mut |_, _| Err(crate::Error::invalid("no memory")));
        assert!(e.is_err());
    }
}
