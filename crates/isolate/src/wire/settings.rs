//! Options and capabilities as bytes: every field, named one by one, so that a new one cannot be forgotten (INV-9, L42).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use ftcore::{
    Capabilities, DType, DTypeSet, Device, DeviceKind, Feature, FeatureSet, GroupOptions, OpKind, OpSet,
    ReduceOp, Result,
};

use super::{Reader, Writer, odd};

/// The features, for decoding their bits.
pub(crate) const FEATURES: [Feature; 10] = [
    Feature::Abort,
    Feature::Reconfigure,
    Feature::MismatchDetection,
    Feature::BitwiseEqual,
    Feature::Contributors,
    Feature::Tags,
    Feature::RecvAny,
    Feature::ThreadRanks,
    Feature::Split,
    Feature::Borrow,
];

pub(crate) fn put_options(w: &mut Writer, options: &GroupOptions) {
    let GroupOptions {
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
    } = options;
    w.u64(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
    w.option(*is_high_priority_stream, Writer::bool);
    w.option(*cga_cluster_size, Writer::u32);
    w.option(*min_ctas, Writer::u32);
    w.option(*max_ctas, Writer::u32);
    // As bytes, not as text for people: nothing may be cut off.
    w.option(net_name.as_deref(), |w, n| w.bytes(n.as_bytes()));
    w.option(*split_share, Writer::bool);
    w.option(*blocking, Writer::bool);
    w.option(*traffic_class, Writer::u32);
    w.len(hints.len());
    for (name, value) in hints {
        w.bytes(name.as_bytes());
        w.bytes(value.as_bytes());
    }
    w.bool(*lenient);
}

fn exact(r: &mut Reader<'_>) -> Result<String> {
    std::str::from_utf8(r.bytes()?)
        .map(str::to_string)
        .map_err(|_| odd("a name that is not UTF-8"))
}

pub(crate) fn get_options(r: &mut Reader<'_>) -> Result<GroupOptions> {
    Ok(GroupOptions {
        timeout: Duration::from_nanos(r.u64()?),
        is_high_priority_stream: r.option(Reader::bool)?,
        cga_cluster_size: r.option(Reader::u32)?,
        min_ctas: r.option(Reader::u32)?,
        max_ctas: r.option(Reader::u32)?,
        net_name: r.option(exact)?,
        split_share: r.option(Reader::bool)?,
        blocking: r.option(Reader::bool)?,
        traffic_class: r.option(Reader::u32)?,
        hints: {
            let n = r.len()?;
            let mut hints = BTreeMap::new();
            for _ in 0..n {
                hints.insert(exact(r)?, exact(r)?);
            }
            hints
        },
        lenient: r.bool()?,
    })
}

pub(crate) fn put_device(w: &mut Writer, device: &Device) {
    w.text(device.kind.name());
    w.u32(device.index);
}

pub(crate) fn get_device(r: &mut Reader<'_>) -> Result<Device> {
    let kind: DeviceKind = r.text()?.parse()?;
    Ok(Device::new(kind, r.u32()?))
}

fn put_names(w: &mut Writer, names: &[Cow<'static, str>]) {
    w.len(names.len());
    for name in names {
        w.text(name);
    }
}

fn get_names(r: &mut Reader<'_>) -> Result<Vec<Cow<'static, str>>> {
    (0..r.len()?).map(|_| r.text().map(Cow::from)).collect()
}

pub(crate) fn put_capabilities(w: &mut Writer, capabilities: &Capabilities) {
    let Capabilities {
        ops,
        moves,
        reduces,
        features,
        options,
        devices,
        notes,
    } = capabilities;
    w.u32(ops.bits());
    w.u32(moves.bits());
    for set in reduces {
        w.u32(set.bits());
    }
    w.u32(features.bits());
    put_names(w, options);
    put_names(w, devices);
    w.len(notes.len());
    for (op, text) in notes {
        w.text(op);
        w.text(text);
    }
}

fn get_dtypes(r: &mut Reader<'_>) -> Result<DTypeSet> {
    let bits = r.u32()?;
    let has = |d: &DType| bits & (1 << d.code()) != 0;
    Ok(DTypeSet::of(
        &DType::ALL.into_iter().filter(has).collect::<Vec<_>>(),
    ))
}

pub(crate) fn get_capabilities(r: &mut Reader<'_>) -> Result<Capabilities> {
    let bits = r.u32()?;
    let ops: Vec<OpKind> = OpKind::ALL
        .into_iter()
        .filter(|k| bits & (1 << k.code()) != 0)
        .collect();
    let moves = get_dtypes(r)?;
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    for set in &mut reduces {
        *set = get_dtypes(r)?;
    }
    let bits = r.u32()?;
    let features: Vec<Feature> = FEATURES
        .into_iter()
        .filter(|&f| bits & (1 << f as u8) != 0)
        .collect();
    Ok(Capabilities {
        ops: OpSet::of(&ops),
        moves,
        reduces,
        features: FeatureSet::of(&features),
        options: get_names(r)?,
        devices: get_names(r)?,
        notes: {
            let n = r.len()?;
            (0..n)
                .map(|_| Ok((r.text()?.into(), r.text()?.into())))
                .collect::<Result<_>>()?
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options_crossed(o: &GroupOptions) -> GroupOptions {
        let mut w = Writer::new(0);
        put_options(&mut w, o);
        let frame = w.finish().unwrap();
        let mut r = Reader::new(&frame[5..]);
        let back = get_options(&mut r).unwrap();
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
            assert_eq!(options_crossed(o), *o);
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
        assert_eq!(options_crossed(&all), all);
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
        let crossed = |c: &Capabilities| {
            let mut w = Writer::new(0);
            put_capabilities(&mut w, c);
            let frame = w.finish().unwrap();
            let mut r = Reader::new(&frame[5..]);
            let back = get_capabilities(&mut r).unwrap();
            r.end().unwrap();
            back
        };
        assert_eq!(crossed(&c), c);
        for (i, op) in OpKind::ALL.into_iter().enumerate() {
            c.ops = c.ops.with(op);
            c.moves = c.moves.with(DType::ALL[i % 15]);
            c.reduces[i % 9] = c.reduces[i % 9].with(DType::ALL[i % 15]);
            c.features = c.features.with(FEATURES[i % FEATURES.len()]);
            assert_eq!(crossed(&c), c);
        }
    }
}
