//! Options and capabilities as bytes: every field, named one by one, so that a new one cannot be forgotten (INV-9, L42).

use ftcore::{
    Capabilities, DType, DTypeSet, Device, DeviceKind, FeatureSet, GroupOptions, OpSet, ReduceOp, Result,
};

use super::{Reader, Wire, Writer, odd, record};

record!(GroupOptions {
    timeout,
    is_high_priority_stream,
    cga_cluster_size,
    min_ctas,
    max_ctas,
    net_name,
    split_share,
    blocking,
    traffic_class,
    hints,
    lenient,
});

record!(Device { kind, index });

record!(Capabilities {
    ops,
    moves,
    reduces,
    features,
    options,
    devices,
    notes,
});

impl Wire for DeviceKind {
    fn put(&self, w: &mut Writer) {
        w.bytes(self.name().as_bytes());
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        String::get(r)?.parse()
    }
}

impl Wire for DType {
    fn put(&self, w: &mut Writer) {
        w.u8(self.code());
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        let code = r.u8()?;
        Self::from_code(code).ok_or_else(|| odd(format_args!("the unknown dtype {code}")))
    }
}

/// Bits that stand for nothing here are of another build, and left out.
macro_rules! sets {
    ($($set:ty),*) => {$(
        impl Wire for $set {
            fn put(&self, w: &mut Writer) {
                self.bits().put(w);
            }
            fn get(r: &mut Reader<'_>) -> Result<Self> {
                u32::get(r).map(Self::from_bits_truncate)
            }
        }
    )*};
}

sets!(OpSet, DTypeSet, FeatureSet);

impl Wire for [DTypeSet; ReduceOp::COUNT] {
    fn put(&self, w: &mut Writer) {
        self.iter().for_each(|set| set.put(w));
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        let mut sets = [DTypeSet::NONE; ReduceOp::COUNT];
        for set in &mut sets {
            *set = DTypeSet::get(r)?;
        }
        Ok(sets)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use ftcore::{Feature, OpKind};

    use super::*;

    fn crossed<T: Wire>(value: &T) -> T {
        let mut w = Writer::new(0);
        value.put(&mut w);
        let frame = w.finish().unwrap();
        let mut r = Reader::new(&frame[5..]);
        let back = T::get(&mut r).unwrap();
        r.end().unwrap();
        back
    }

    #[test]
    fn l42_every_option_crosses_unchanged_alone_and_together() {
        let plain = GroupOptions::default;
        let hints: BTreeMap<_, _> = [("spin_us", "5"), ("", ""), ("ü", "a=b\n")]
            .map(|(a, b)| (a.to_string(), b.to_string()))
            .into();
        let each = [
            GroupOptions {
                timeout: Duration::from_nanos(1),
                ..plain()
            },
            GroupOptions {
                is_high_priority_stream: Some(false),
                ..plain()
            },
            GroupOptions {
                cga_cluster_size: Some(4),
                ..plain()
            },
            GroupOptions {
                min_ctas: Some(0),
                ..plain()
            },
            GroupOptions {
                max_ctas: Some(u32::MAX),
                ..plain()
            },
            GroupOptions {
                net_name: Some("x".repeat(100_000)),
                ..plain()
            },
            GroupOptions {
                split_share: Some(true),
                ..plain()
            },
            GroupOptions {
                blocking: Some(true),
                ..plain()
            },
            GroupOptions {
                traffic_class: Some(7),
                ..plain()
            },
            GroupOptions {
                hints: hints.clone(),
                ..plain()
            },
            GroupOptions {
                lenient: true,
                ..plain()
            },
        ];
        for o in &each {
            assert_ne!(*o, plain());
            assert_eq!(crossed(o), *o);
        }
        let all = GroupOptions {
            timeout: Duration::from_secs(3),
            is_high_priority_stream: Some(true),
            cga_cluster_size: Some(1),
            min_ctas: Some(2),
            max_ctas: Some(3),
            net_name: Some("eth0".into()),
            split_share: Some(false),
            blocking: Some(false),
            traffic_class: Some(4),
            hints,
            lenient: false,
        };
        assert_eq!(crossed(&all), all);
    }

    #[test]
    fn capabilities_cross_bit_by_bit() {
        let mut c = Capabilities {
            ops: OpSet::NONE,
            moves: DTypeSet::NONE,
            reduces: [DTypeSet::NONE; ReduceOp::COUNT],
            features: FeatureSet::NONE,
            options: ftcore::names(&["net_name", "hint:x"]),
            devices: ftcore::names(&["cpu"]),
            notes: ftcore::notes(&[("reduce", "composed")]),
        };
        assert_eq!(crossed(&c), c);
        for (i, op) in OpKind::ALL.into_iter().enumerate() {
            c.ops = c.ops.with(op);
            c.moves = c.moves.with(DType::ALL[i % 15]);
            c.reduces[i % 9] = c.reduces[i % 9].with(DType::ALL[i % 15]);
            c.features = c.features.with(Feature::ALL[i % Feature::ALL.len()]);
            assert_eq!(crossed(&c), c);
        }
    }
}
