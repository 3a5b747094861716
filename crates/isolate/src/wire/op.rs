//! Collectives as bytes: the variant, its numbers, and where each tensor lies in shared memory.

use ftcore::{Collective, DType, OpKind, ReduceOp, Result, Tensor};

use super::{Reader, Writer, odd};

/// Where a tensor lies: a segment, a byte offset in it, and what is there. Nothing is there if `count` is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u32,
    pub(crate) offset: u64,
    pub(crate) dtype: DType,
    pub(crate) count: u64,
}

/// What happens to a tensor's bytes: whether the operation reads them, and whether it leaves results in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) read: bool,
    pub(crate) written: bool,
}

const READ: Flow = Flow {
    read: true,
    written: false,
};
const WRITTEN: Flow = Flow {
    read: false,
    written: true,
};
const BOTH: Flow = Flow {
    read: true,
    written: true,
};

/// The flow of every tensor on `rank`, in the order of [`Collective::tensors`].
pub(crate) fn flows(op: &Collective, rank: u32) -> Vec<Flow> {
    let lists = |first: usize, then: usize, a: Flow, b: Flow| {
        std::iter::repeat_n(a, first)
            .chain(std::iter::repeat_n(b, then))
            .collect()
    };
    match op {
        Collective::AllReduce { tensors, .. }
        | Collective::AllGatherInPlace { tensors }
        | Collective::ReduceScatterInPlace { tensors, .. } => vec![BOTH; tensors.len()],
        Collective::Broadcast { tensors, root } => {
            // A backend makes bools canonical, the root's too.
            let flow = |t: &Tensor| match (*root == rank, t.dtype()) {
                (true, DType::Bool) => BOTH,
                (true, _) => READ,
                (false, _) => WRITTEN,
            };
            tensors.iter().map(flow).collect()
        }
        Collective::Reduce { root, .. } => vec![if *root == rank { BOTH } else { READ }],
        Collective::AllGather { outputs, .. } | Collective::Gather { outputs, .. } => {
            lists(1, outputs.len(), READ, WRITTEN)
        }
        Collective::AllGatherInto { pairs } | Collective::ReduceScatterInto { pairs, .. } => {
            pairs.iter().flat_map(|_| [READ, WRITTEN]).collect()
        }
        Collective::Scatter { inputs, .. } | Collective::ReduceScatter { inputs, .. } => {
            lists(inputs.len(), 1, READ, WRITTEN)
        }
        Collective::AllToAll { inputs, outputs } => lists(inputs.len(), outputs.len(), READ, WRITTEN),
        Collective::AllToAllInto { .. } => vec![READ, WRITTEN],
        Collective::Send { .. } => vec![READ],
        Collective::Recv { .. } => vec![WRITTEN],
        Collective::Batch { ops } => ops.iter().flat_map(|o| flows(o, rank)).collect(),
        // A variant that is newer than this list: everything both ways is right for all.
        other => vec![BOTH; other.tensors().len()],
    }
}

/// Writes `op` with its tensors at `places` (in the order of [`Collective::tensors`]). `Unsupported` for an operation that
/// is newer than this format.
pub(crate) fn put(w: &mut Writer, op: &Collective, places: &mut dyn Iterator<Item = Place>) -> Result<()> {
    w.u8(op.kind().code());
    let mut all = |w: &mut Writer, n: usize| {
        w.len(n);
        for place in std::iter::from_fn(|| places.next()).take(n) {
            w.u32(place.segment);
            w.u64(place.offset);
            w.u8(place.dtype.code());
            w.u64(place.count);
        }
    };
    match op {
        Collective::AllReduce { tensors, op } => {
            put_reduce(w, *op);
            all(w, tensors.len());
        }
        Collective::Broadcast { tensors, root } => {
            w.u32(*root);
            all(w, tensors.len());
        }
        Collective::Reduce { op, root, .. } => {
            put_reduce(w, *op);
            w.u32(*root);
            all(w, 1);
        }
        Collective::AllGather { outputs, .. } => {
            all(w, 1);
            all(w, outputs.len());
        }
        Collective::AllGatherInto { pairs } => all(w, pairs.len() * 2),
        Collective::AllGatherInPlace { tensors } => all(w, tensors.len()),
        Collective::Gather { outputs, root, .. } => {
            w.u32(*root);
            all(w, 1);
            all(w, outputs.len());
        }
        Collective::Scatter { inputs, root, .. } => {
            w.u32(*root);
            all(w, inputs.len());
            all(w, 1);
        }
        Collective::ReduceScatter { inputs, op, .. } => {
            put_reduce(w, *op);
            all(w, inputs.len());
            all(w, 1);
        }
        Collective::ReduceScatterInto { pairs, op } => {
            put_reduce(w, *op);
            all(w, pairs.len() * 2);
        }
        Collective::ReduceScatterInPlace { tensors, op } => {
            put_reduce(w, *op);
            all(w, tensors.len());
        }
        Collective::AllToAll { inputs, outputs } => {
            all(w, inputs.len());
            all(w, outputs.len());
        }
        Collective::AllToAllInto {
            input_splits,
            output_splits,
            ..
        } => {
            for splits in [input_splits, output_splits] {
                w.len(splits.len());
                splits.iter().for_each(|&s| w.u64(s as u64));
            }
            all(w, 2);
        }
        Collective::Send { peer, tag, .. } => {
            w.u32(*peer);
            w.u32(*tag);
            all(w, 1);
        }
        Collective::Recv { peer, tag, .. } => {
            w.option(*peer, Writer::u32);
            w.u32(*tag);
            all(w, 1);
        }
        Collective::Barrier => {}
        Collective::MonitoredBarrier { wait_all } => w.bool(*wait_all),
        Collective::Batch { ops } => {
            w.len(ops.len());
            for op in ops {
                put(w, op, places)?;
            }
        }
        other => {
            return Err(ftcore::Error::unsupported(format!(
                "{} cannot cross into a child process in this version",
                other.kind()
            )));
        }
    }
    Ok(())
}

fn put_reduce(w: &mut Writer, op: ReduceOp) {
    w.u8(op.code());
    if let ReduceOp::PremulSum(factor) = op {
        w.f64(factor);
    }
}

fn get_reduce(r: &mut Reader<'_>) -> Result<ReduceOp> {
    Ok(match r.u8()? {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::Band,
        6 => ReduceOp::Bor,
        7 => ReduceOp::Bxor,
        8 => ReduceOp::PremulSum(r.f64()?),
        other => return Err(odd(format_args!("the unknown reduction {other}"))),
    })
}

fn get_place(r: &mut Reader<'_>) -> Result<Place> {
    Ok(Place {
        segment: r.u32()?,
        offset: r.u64()?,
        dtype: {
            let code = r.u8()?;
            DType::from_code(code).ok_or_else(|| odd(format_args!("the unknown dtype {code}")))?
        },
        count: r.u64()?,
    })
}

/// Reads an operation; `tensor` finds the memory of a place, or refuses it.
pub(crate) fn get(r: &mut Reader<'_>, tensor: &mut dyn FnMut(Place) -> Result<Tensor>) -> Result<Collective> {
    get_op(r, tensor, true)
}

fn get_op(
    r: &mut Reader<'_>,
    tensor: &mut dyn FnMut(Place) -> Result<Tensor>,
    batch: bool,
) -> Result<Collective> {
    let code = r.u8()?;
    let kind = *OpKind::ALL
        .get(usize::from(code))
        .ok_or_else(|| odd(format_args!("the unknown operation {code}")))?;
    let mut all = |r: &mut Reader<'_>| -> Result<Vec<Tensor>> {
        (0..r.len()?).map(|_| tensor(get_place(r)?)).collect()
    };
    Ok(match kind {
        OpKind::AllReduce => Collective::AllReduce {
            op: get_reduce(r)?,
            tensors: all(r)?,
        },
        OpKind::Broadcast => Collective::Broadcast {
            root: r.u32()?,
            tensors: all(r)?,
        },
        OpKind::Reduce => Collective::Reduce {
            op: get_reduce(r)?,
            root: r.u32()?,
            tensor: one(all(r)?)?,
        },
        OpKind::AllGather => Collective::AllGather {
            input: one(all(r)?)?,
            outputs: all(r)?,
        },
        OpKind::AllGatherInto => Collective::AllGatherInto {
            pairs: pairs(all(r)?)?,
        },
        OpKind::AllGatherInPlace => Collective::AllGatherInPlace { tensors: all(r)? },
        OpKind::Gather => Collective::Gather {
            root: r.u32()?,
            input: one(all(r)?)?,
            outputs: all(r)?,
        },
        OpKind::Scatter => Collective::Scatter {
            root: r.u32()?,
            inputs: all(r)?,
            output: one(all(r)?)?,
        },
        OpKind::ReduceScatter => Collective::ReduceScatter {
            op: get_reduce(r)?,
            inputs: all(r)?,
            output: one(all(r)?)?,
        },
        OpKind::ReduceScatterInto => Collective::ReduceScatterInto {
            op: get_reduce(r)?,
            pairs: pairs(all(r)?)?,
        },
        OpKind::ReduceScatterInPlace => Collective::ReduceScatterInPlace {
            op: get_reduce(r)?,
            tensors: all(r)?,
        },
        OpKind::AllToAll => Collective::AllToAll {
            inputs: all(r)?,
            outputs: all(r)?,
        },
        OpKind::AllToAllInto => {
            let splits = |r: &mut Reader<'_>| (0..r.len()?).map(|_| r.usize()).collect::<Result<Vec<_>>>();
            let (input_splits, output_splits) = (splits(r)?, splits(r)?);
            let both = pairs(all(r)?)?;
            let [(input, output)] =
                <[_; 1]>::try_from(both).map_err(|_| odd("not one input and one output"))?;
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            }
        }
        OpKind::Send => Collective::Send {
            peer: r.u32()?,
            tag: r.u32()?,
            tensor: one(all(r)?)?,
        },
        OpKind::Recv => Collective::Recv {
            peer: r.option(Reader::u32)?,
            tag: r.u32()?,
            tensor: one(all(r)?)?,
        },
        OpKind::Barrier => Collective::Barrier,
        OpKind::MonitoredBarrier => Collective::MonitoredBarrier { wait_all: r.bool()? },
        OpKind::Batch if batch => {
            let n = r.len()?;
            Collective::Batch {
                ops: (0..n).map(|_| get_op(r, tensor, false)).collect::<Result<_>>()?,
            }
        }
        other => return Err(odd(format_args!("{other} where it cannot be"))),
    })
}

fn one(tensors: Vec<Tensor>) -> Result<Tensor> {
    let [tensor] =
        <[_; 1]>::try_from(tensors).map_err(|v| odd(format_args!("{} tensors for one", v.len())))?;
    Ok(tensor)
}

fn pairs(tensors: Vec<Tensor>) -> Result<Vec<(Tensor, Tensor)>> {
    if !tensors.len().is_multiple_of(2) {
        return Err(odd("an odd number of tensors in pairs"));
    }
    let mut rest = tensors.into_iter();
    Ok(std::iter::from_fn(|| rest.next().zip(rest.next())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One operation of each kind, every tensor of another size.
    fn every() -> Vec<Collective> {
        let next = std::cell::Cell::new(0usize);
        let t = || {
            next.set(next.get() + 1);
            Tensor::zeros(DType::I16, next.get())
        };
        let op = ReduceOp::PremulSum(0.5);
        vec![
            Collective::AllReduce {
                tensors: vec![t(), t(), t()],
                op,
            },
            Collective::Broadcast {
                tensors: vec![t(), t()],
                root: 3,
            },
            Collective::Reduce {
                tensor: t(),
                op: ReduceOp::Bxor,
                root: 2,
            },
            Collective::AllGather {
                input: t(),
                outputs: vec![t(), t(), t()],
            },
            Collective::AllGatherInto {
                pairs: vec![(t(), t()), (t(), t())],
            },
            Collective::Gather {
                input: t(),
                outputs: vec![],
                root: 1,
            },
            Collective::Gather {
                input: t(),
                outputs: vec![t(), t()],
                root: 1,
            },
            Collective::Scatter {
                inputs: vec![t(), t()],
                output: t(),
                root: 0,
            },
            Collective::ReduceScatter {
                inputs: vec![t(), t()],
                output: t(),
                op: ReduceOp::Max,
            },
            Collective::ReduceScatterInto {
                pairs: vec![(t(), t())],
                op: ReduceOp::Avg,
            },
            Collective::AllGatherInPlace {
                tensors: vec![t(), t()],
            },
            Collective::ReduceScatterInPlace {
                tensors: vec![t()],
                op,
            },
            Collective::AllToAll {
                inputs: vec![t(), t()],
                outputs: vec![t()],
            },
            Collective::AllToAllInto {
                input: t(),
                output: t(),
                input_splits: vec![1, 2],
                output_splits: vec![],
            },
            Collective::Send {
                tensor: t(),
                peer: 4,
                tag: 77,
            },
            Collective::Recv {
                tensor: t(),
                peer: None,
                tag: 0,
            },
            Collective::Recv {
                tensor: t(),
                peer: Some(9),
                tag: u32::MAX,
            },
            Collective::Barrier,
            Collective::MonitoredBarrier { wait_all: true },
            Collective::Batch {
                ops: vec![
                    Collective::Send {
                        tensor: t(),
                        peer: 1,
                        tag: 2,
                    },
                    Collective::Recv {
                        tensor: t(),
                        peer: Some(1),
                        tag: 2,
                    },
                    Collective::Recv {
                        tensor: t(),
                        peer: Some(2),
                        tag: 3,
                    },
                ],
            },
        ]
    }

    fn encode(op: &Collective) -> Vec<u8> {
        let mut places = op.tensors().into_iter().map(|t| Place {
            segment: 1,
            offset: t.count() as u64 * 100,
            dtype: t.dtype(),
            count: t.count() as u64,
        });
        let mut w = Writer::new(0);
        put(&mut w, op, &mut places).unwrap();
        assert!(places.next().is_none(), "{op:?}: a tensor was left out");
        w.finish().unwrap().split_off(5)
    }

    fn decode(bytes: &[u8]) -> Result<Collective> {
        let mut r = Reader::new(bytes);
        let op = get(&mut r, &mut |p| {
            if p.count > 1000 || p.offset != p.count * 100 {
                return Err(odd("another place"));
            }
            Ok(Tensor::zeros(p.dtype, p.count as usize))
        })?;
        r.end()?;
        Ok(op)
    }

    #[test]
    fn every_operation_crosses_with_all_its_numbers_and_tensors() {
        let ops = every();
        for kind in OpKind::ALL {
            assert!(ops.iter().any(|o| o.kind() == kind), "{kind} is not tested");
        }
        for op in &ops {
            let back = decode(&encode(op)).unwrap();
            assert_eq!(format!("{back:?}"), format!("{op:?}"));
        }
        for code in 0..u8::try_from(ReduceOp::COUNT).unwrap() {
            let mut bytes = vec![code];
            bytes.extend_from_slice(&2.5f64.to_bits().to_le_bytes());
            assert_eq!(get_reduce(&mut Reader::new(&bytes)).unwrap().code(), code);
        }
    }

    #[test]
    fn damaged_operations_are_refused_without_a_panic() {
        for op in every() {
            let bytes = encode(&op);
            for i in 0..bytes.len() {
                assert!(decode(&bytes[..i]).is_err(), "{op:?} cut at {i}");
                for v in [0, 1, 5, 15, 16, 127, 255] {
                    let mut b = bytes.clone();
                    b[i] = v;
                    drop(decode(&b));
                }
            }
        }
        // A batch in a batch would be a way to any depth.
        let nested = [15u8, 1, 0, 0, 0, 15, 1, 0, 0, 0, 13];
        assert!(decode(&nested).is_err());
    }

    #[test]
    fn every_tensor_has_a_flow_and_no_input_comes_back_written() {
        for op in every() {
            for rank in 0..4 {
                assert_eq!(flows(&op, rank).len(), op.tensors().len(), "{op:?}");
            }
        }
        let reduce = Collective::Reduce {
            tensor: Tensor::zeros(DType::U8, 1),
            op: ReduceOp::Sum,
            root: 1,
        };
        assert_eq!(flows(&reduce, 0), [READ]);
        assert_eq!(flows(&reduce, 1), [BOTH]);
        let broadcast = Collective::Broadcast {
            tensors: vec![Tensor::zeros(DType::U8, 1)],
            root: 0,
        };
        assert_eq!(flows(&broadcast, 0), [READ]);
        assert_eq!(flows(&broadcast, 1), [WRITTEN]);
    }
}
