//! Collectives as bytes: the variant, its numbers, and where each tensor lies in shared memory.

use ftcore::{Collective, DType, OpKind, ReduceOp, Result, Tensor};

use super::{Reader, Wire, Writer, odd, record};

/// Where a tensor lies: a segment, a byte offset in it, and what is there. Nothing is there if `count` is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u32,
    pub(crate) offset: u64,
    pub(crate) dtype: DType,
    pub(crate) count: u64,
}

record!(Place {
    segment,
    offset,
    dtype,
    count,
});

/// The places of the tensors that are written, in the order of [`Collective::tensors`].
type Places<'a> = &'a mut dyn Iterator<Item = Place>;
/// Finds the memory of a place, or refuses it.
type Find<'a> = &'a mut dyn FnMut(Place) -> Result<Tensor>;

/// A field of a collective. Of tensors the places cross.
trait Field: Sized {
    fn put(&self, w: &mut Writer, places: Places<'_>);
    fn get(r: &mut Reader<'_>, find: Find<'_>) -> Result<Self>;
}

impl<T: Wire> Field for T {
    fn put(&self, w: &mut Writer, _: Places<'_>) {
        Wire::put(self, w);
    }
    fn get(r: &mut Reader<'_>, _: Find<'_>) -> Result<Self> {
        Wire::get(r)
    }
}

impl Field for Tensor {
    fn put(&self, w: &mut Writer, places: Places<'_>) {
        // There is one for each tensor; a reader without it refuses the frame.
        if let Some(place) = places.next() {
            Wire::put(&place, w);
        }
    }
    fn get(r: &mut Reader<'_>, find: Find<'_>) -> Result<Self> {
        find(Wire::get(r)?)
    }
}

impl Field for (Tensor, Tensor) {
    fn put(&self, w: &mut Writer, places: Places<'_>) {
        self.0.put(w, places);
        self.1.put(w, places);
    }
    fn get(r: &mut Reader<'_>, find: Find<'_>) -> Result<Self> {
        Ok((Field::get(r, find)?, Field::get(r, find)?))
    }
}

/// Lists of what is no [`Wire`].
macro_rules! lists {
    ($($item:ty),*) => {$(
        impl Field for Vec<$item> {
            fn put(&self, w: &mut Writer, places: Places<'_>) {
                w.len(self.len());
                self.iter().for_each(|item| item.put(w, places));
            }
            fn get(r: &mut Reader<'_>, find: Find<'_>) -> Result<Self> {
                (0..r.len()?).map(|_| Field::get(r, find)).collect()
            }
        }
    )*};
}

lists!(Tensor, (Tensor, Tensor));

/// Writing and reading for these variants of [`Collective`], with their fields in the order in which they cross: tensors in that of
/// [`Collective::tensors`].
macro_rules! collectives {
    ($($variant:ident $({ $($field:ident),* })?),*) => {
        fn put_fields(w: &mut Writer, op: &Collective, places: Places<'_>) -> Result<()> {
            match op {
                $(Collective::$variant { $($($field),*)? } => {
                    $($(Field::put($field, w, places);)*)?
                })*
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

        fn get_fields(kind: OpKind, r: &mut Reader<'_>, find: Find<'_>, batch: bool) -> Result<Collective> {
            Ok(match kind {
                $(OpKind::$variant => Collective::$variant { $($($field: Field::get(r, find)?),*)? },)*
                // A batch in a batch would be a way to any depth.
                OpKind::Batch if batch => Collective::Batch {
                    ops: (0..r.len()?).map(|_| get_op(r, find, false)).collect::<Result<_>>()?,
                },
                other => return Err(odd(format_args!("{other} where it cannot be"))),
            })
        }
    };
}

collectives! {
    AllReduce { op, tensors },
    Broadcast { root, tensors },
    Reduce { op, root, tensor },
    AllGather { input, outputs },
    AllGatherInto { pairs },
    AllGatherInPlace { tensors },
    Gather { root, input, outputs },
    Scatter { root, inputs, output },
    ReduceScatter { op, inputs, output },
    ReduceScatterInto { op, pairs },
    ReduceScatterInPlace { op, tensors },
    AllToAll { inputs, outputs },
    AllToAllInto { input_splits, output_splits, input, output },
    Send { peer, tag, tensor },
    Recv { peer, tag, tensor },
    Barrier,
    MonitoredBarrier { wait_all }
}

/// Writes `op` with its tensors at `places` (in the order of [`Collective::tensors`]). `Unsupported` for an operation that
/// is newer than this format.
pub(crate) fn put(w: &mut Writer, op: &Collective, places: Places<'_>) -> Result<()> {
    w.u8(op.kind().code());
    put_fields(w, op, places)
}

/// Reads an operation; `find` finds the memory of a place, or refuses it.
pub(crate) fn get(r: &mut Reader<'_>, find: Find<'_>) -> Result<Collective> {
    get_op(r, find, true)
}

fn get_op(r: &mut Reader<'_>, find: Find<'_>, batch: bool) -> Result<Collective> {
    let code = r.u8()?;
    let kind = OpKind::from_code(code);
    let kind = kind.ok_or_else(|| odd(format_args!("the unknown operation {code}")))?;
    get_fields(kind, r, find, batch)
}

impl Wire for ReduceOp {
    fn put(&self, w: &mut Writer) {
        w.u8(self.code());
        if let Self::PremulSum(factor) = self {
            Wire::put(factor, w);
        }
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        Ok(match r.u8()? {
            0 => Self::Sum,
            1 => Self::Avg,
            2 => Self::Product,
            3 => Self::Min,
            4 => Self::Max,
            5 => Self::Band,
            6 => Self::Bor,
            7 => Self::Bxor,
            8 => Self::PremulSum(Wire::get(r)?),
            other => return Err(odd(format_args!("the unknown reduction {other}"))),
        })
    }
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
            assert_eq!(
                <ReduceOp as Wire>::get(&mut Reader::new(&bytes)).unwrap().code(),
                code
            );
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
}
