//! Capabilities and group options across the boundary.

use std::borrow::Cow;
use std::ffi::c_void;
use std::time::Duration;

use ftcore::{Capabilities, DTypeSet, FeatureSet, GroupOptions, OpSet, ReduceOp};

use crate::abi::{self, Growing, Note, Str};
use crate::{fault, text};

/// The function that takes capabilities.
pub(crate) type Reply = Option<unsafe extern "C" fn(*mut c_void, *const abi::Capabilities)>;

/// Gives capabilities to the caller, whose `reply` copies them.
///
/// # Safety
/// `reply` and `ctx` belong to the call that is running.
pub(crate) unsafe fn tell(capabilities: &Capabilities, ctx: *mut c_void, reply: Reply) {
    let Some(reply) = reply else { return };
    let reduces: Vec<u32> = capabilities.reduces.iter().map(|s| s.bits()).collect();
    let strings = |list: &[Cow<'static, str>]| -> Vec<Str> { list.iter().map(|s| text::lend(s)).collect() };
    let (options, devices) = (strings(&capabilities.options), strings(&capabilities.devices));
    let notes: Vec<Note> = capabilities
        .notes
        .iter()
        .map(|(subject, words)| Note {
            subject: text::lend(subject),
            text: text::lend(words),
        })
        .collect();
    let mut c = abi::Capabilities::empty();
    c.ops = capabilities.ops.bits();
    c.moves = capabilities.moves.bits();
    c.features = capabilities.features.bits();
    c.reduce_count = u32::try_from(reduces.len()).unwrap_or(0);
    c.reduces = reduces.as_ptr();
    c.options = options.as_ptr();
    c.option_count = options.len() as u64;
    c.devices = devices.as_ptr();
    c.device_count = devices.len() as u64;
    c.notes = notes.as_ptr();
    c.note_count = notes.len() as u64;
    // SAFETY: all lists live until the call returns.
    unsafe { reply(ctx, &raw const c) }
}

/// Reads capabilities; bits that this build does not know are left out. Errors are in words.
///
/// # Safety
/// The other side keeps to the ABI: lists and texts are readable for the call.
pub(crate) unsafe fn read(from: *const abi::Capabilities) -> Result<Capabilities, String> {
    // SAFETY: same contract.
    let c = unsafe { abi::read(from) }?;
    // SAFETY: same contract.
    let sets = unsafe { text::list(c.reduces, u64::from(c.reduce_count), "reductions") }?;
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    for (to, from) in reduces.iter_mut().zip(sets) {
        *to = DTypeSet::from_bits_truncate(*from);
    }
    let owned = |list: Vec<String>| list.into_iter().map(Cow::Owned).collect();
    // SAFETY: same contract.
    let (options, devices, notes) = unsafe {
        (
            text::texts(c.options, c.option_count, "options")?,
            text::texts(c.devices, c.device_count, "devices")?,
            text::pairs(c.notes, c.note_count, "notes")?,
        )
    };
    Ok(Capabilities {
        ops: OpSet::from_bits_truncate(c.ops),
        moves: DTypeSet::from_bits_truncate(c.moves),
        reduces,
        features: FeatureSet::from_bits_truncate(c.features),
        options: owned(options),
        devices: owned(devices),
        notes: notes
            .into_iter()
            .map(|(a, b)| (Cow::Owned(a), Cow::Owned(b)))
            .collect(),
    })
}

/// Lends group options to `call`.
pub(crate) fn with_options<R>(options: &GroupOptions, call: impl FnOnce(*const abi::GroupOptions) -> R) -> R {
    let hints: Vec<Note> = options
        .hints
        .iter()
        .map(|(name, value)| Note {
            subject: text::lend(name),
            text: text::lend(value),
        })
        .collect();
    let mut c = abi::GroupOptions::empty();
    c.lenient = u32::from(options.lenient);
    c.timeout_ms = fault::whole(options.timeout);
    let mut number = |bit: u32, value: Option<u32>| {
        if value.is_some() {
            c.set |= bit;
        }
        value.unwrap_or(0)
    };
    let high = number(
        abi::OPTION_HIGH_PRIORITY,
        options.is_high_priority_stream.map(u32::from),
    );
    let cga = number(abi::OPTION_CGA_CLUSTER_SIZE, options.cga_cluster_size);
    let min = number(abi::OPTION_MIN_CTAS, options.min_ctas);
    let max = number(abi::OPTION_MAX_CTAS, options.max_ctas);
    let share = number(abi::OPTION_SPLIT_SHARE, options.split_share.map(u32::from));
    let blocking = number(abi::OPTION_BLOCKING, options.blocking.map(u32::from));
    let class = number(abi::OPTION_TRAFFIC_CLASS, options.traffic_class);
    let _ = number(abi::OPTION_NET_NAME, options.net_name.as_ref().map(|_| 0));
    c.is_high_priority_stream = high;
    c.cga_cluster_size = cga;
    c.min_ctas = min;
    c.max_ctas = max;
    c.split_share = share;
    c.blocking = blocking;
    c.traffic_class = class;
    if let Some(name) = &options.net_name {
        c.net_name = text::lend(name);
    }
    c.hints = hints.as_ptr();
    c.hint_count = hints.len() as u64;
    call(&raw const c)
}

/// Reads group options. Errors are in words; an option that this build does not know is one (INV-9).
///
/// # Safety
/// The other side keeps to the ABI: lists and texts are readable for the call.
pub(crate) unsafe fn read_options(from: *const abi::GroupOptions) -> Result<GroupOptions, String> {
    // SAFETY: same contract.
    let c = unsafe { abi::read(from) }?;
    let has = |bit: u32| c.set & bit != 0;
    if c.set > 2 * abi::OPTION_TRAFFIC_CLASS - 1 {
        return Err(format!("options {:#x} that this build does not know", c.set));
    }
    // SAFETY: same contract.
    let hints = unsafe { text::pairs(c.hints, c.hint_count, "hints") }?;
    // SAFETY: same contract.
    let net_name = unsafe { text::read(c.net_name) }?;
    Ok(GroupOptions {
        timeout: Duration::from_millis(u64::try_from(c.timeout_ms).unwrap_or(0)),
        is_high_priority_stream: has(abi::OPTION_HIGH_PRIORITY).then_some(c.is_high_priority_stream != 0),
        cga_cluster_size: has(abi::OPTION_CGA_CLUSTER_SIZE).then_some(c.cga_cluster_size),
        min_ctas: has(abi::OPTION_MIN_CTAS).then_some(c.min_ctas),
        max_ctas: has(abi::OPTION_MAX_CTAS).then_some(c.max_ctas),
        net_name: has(abi::OPTION_NET_NAME).then_some(net_name),
        split_share: has(abi::OPTION_SPLIT_SHARE).then_some(c.split_share != 0),
        blocking: has(abi::OPTION_BLOCKING).then_some(c.blocking != 0),
        traffic_class: has(abi::OPTION_TRAFFIC_CLASS).then_some(c.traffic_class),
        hints: hints.into_iter().collect(),
        lenient: c.lenient != 0,
    })
}

#[cfg(test)]
mod tests {
    use ftcore::{DType, Feature, OpKind};

    use super::*;

    #[test]
    fn l42_every_option_crosses() {
        let options = GroupOptions {
            timeout: Duration::from_millis(1234),
            is_high_priority_stream: Some(true),
            cga_cluster_size: Some(3),
            min_ctas: Some(4),
            max_ctas: Some(5),
            net_name: Some("eth0".into()),
            split_share: Some(false),
            blocking: Some(true),
            traffic_class: Some(7),
            hints: [("a".to_string(), "1".to_string())].into(),
            lenient: true,
        };
        for o in [options, GroupOptions::default()] {
            // SAFETY: made by `with_options`, valid inside the closure.
            let back = with_options(&o, |c| unsafe { read_options(c) }).unwrap();
            assert_eq!(back, o);
        }
        let endless = GroupOptions {
            timeout: Duration::MAX,
            ..GroupOptions::default()
        };
        // SAFETY: as above.
        let back = with_options(&endless, |c| unsafe { read_options(c) }).unwrap();
        assert!(back.timeout < Duration::from_secs(101 * 365 * 24 * 3600));
        let mut unknown = abi::GroupOptions::empty();
        unknown.set = 256;
        // SAFETY: our own struct.
        assert!(unsafe { read_options(&unknown) }.unwrap_err().contains("0x100"));
    }

    #[test]
    fn capabilities_cross_and_unknown_bits_are_left_out() {
        let all = Capabilities {
            ops: OpSet::of(&[OpKind::AllReduce, OpKind::Batch]),
            moves: DTypeSet::of(&[DType::F64, DType::Bool]),
            reduces: {
                let mut r = [DTypeSet::NONE; ReduceOp::COUNT];
                r[8] = DTypeSet::of(&[DType::F32]);
                r
            },
            features: FeatureSet::of(&[Feature::Abort, Feature::Borrow]),
            options: ftcore::names(&["net_name", "hint:x"]),
            devices: ftcore::names(&["hpu"]),
            notes: ftcore::notes(&[("op", "words")]),
        };
        struct Got(Option<Result<Capabilities, String>>, u32);
        unsafe extern "C" fn take(ctx: *mut c_void, c: *const abi::Capabilities) {
            // SAFETY: the test's own Got and a struct valid for the call.
            unsafe {
                let got = &mut *ctx.cast::<Got>();
                let mut c = *c;
                c.ops |= got.1;
                c.features |= got.1;
                c.moves |= got.1;
                got.0 = Some(read(&raw const c));
            }
        }
        for unknown in [0, 1 << 31] {
            let mut got = Got(None, unknown);
            // SAFETY: `take` fits `got`, which lives until here.
            unsafe { tell(&all, (&raw mut got).cast(), Some(take)) };
            assert_eq!(got.0.unwrap().unwrap(), all);
        }
    }
}
