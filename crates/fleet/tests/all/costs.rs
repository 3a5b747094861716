use oxccl_fleet::{Bytes, Cost, Costs, Format, Group, Link, Links, Operation, Rate, Seconds};
use proptest::prelude::*;

fn link(bits: f64, delay: f64) -> Link {
    Link::new(Rate::new(bits).unwrap(), Seconds::new(delay).unwrap())
}

fn uniform(hosts: u32, ranks: u32, bits: f64, delay: f64) -> Links {
    Links::uniform(hosts, ranks, link(100e9, 1e-6), link(bits, delay)).unwrap()
}

fn all_reduce(links: &Links, bytes: u64) -> Cost {
    let operation = Operation::AllReduce(Bytes(bytes));
    Costs::new(links).of(&Group::all(links), operation).unwrap()
}

fn near(a: f64, b: f64, part: f64) -> bool {
    (a - b).abs() <= part * a.abs().max(b.abs()) + 1e-12
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The parts of an operation differ by an element, and only the walk of all ranks sees every part.
    #[test]
    fn following_one_host_of_equal_ones_gives_what_following_all_gives(
        hosts in 2u32..9, ranks in 1u32..5, elements in 1_000u64..4_000_000, delay in 0.0f64..0.05, gbits in 0.1f64..50.0, which in 0..3
    ) {
        let links = uniform(hosts, ranks, gbits * 1e9, delay);
        let group = Group::all(&links);
        let operation = match which {
            0 => Operation::AllReduce(Bytes(4 * elements)),
            1 => Operation::AllGather(Bytes(4 * elements)),
            _ => Operation::AllToAll(Bytes(elements)),
        };
        let short = Costs::new(&links).of(&group, operation).unwrap();
        let full = Costs::in_full(&links).of(&group, operation).unwrap();
        prop_assert!(near(short.time.get(), full.time.get(), 0.01), "{short:?} {full:?}");
        prop_assert!(near(short.sent.0 as f64, full.sent.0 as f64, 0.01), "{short:?} {full:?}");
    }

    #[test]
    fn more_bytes_slower_links_and_longer_ways_never_take_less(
        hosts in 1u32..7, ranks in 1u32..4, bytes in 1_000u64..8_000_000, delay in 0.0f64..0.05, gbits in 0.1f64..50.0, by in 1.0f64..4.0
    ) {
        // One algorithm for all sizes of a world: at its limits a larger message may go a quicker way.
        let algorithm = |bytes| Group::all(&uniform(hosts, ranks, 1e9, 0.0)).algorithm(Bytes(bytes));
        let more = (bytes as f64 * by) as u64;
        let time = |bytes, gbits: f64, delay| all_reduce(&uniform(hosts, ranks, gbits * 1e9, delay), bytes).time.get();
        let as_is = time(bytes, gbits, delay);
        if hosts == 1 || ranks == 1 {
            prop_assume!(algorithm(bytes) == algorithm(more));
            prop_assert!(time(more, gbits, delay) >= as_is * 0.999);
        }
        prop_assert!(time(bytes, gbits / by, delay) >= as_is);
        prop_assert!(time(bytes, gbits, delay * by) >= as_is);
    }

    #[test]
    fn no_all_reduce_beats_the_line(hosts in 2u32..9, bytes in 1_000_000u64..100_000_000, gbits in 0.1f64..50.0) {
        let cost = all_reduce(&uniform(hosts, 1, gbits * 1e9, 0.0), bytes);
        let least = 2.0 * f64::from(hosts - 1) / f64::from(hosts) * bytes as f64 * 8.0 / (gbits * 1e9);
        prop_assert!(cost.time.get() >= least, "{cost:?} {least}");
        // Headers, and a part that is an element longer than the others.
        prop_assert!(cost.time.get() <= least * 1.06 + 1e-4, "{cost:?} {least}");
    }
}

#[test]
fn what_was_measured_between_namespaces_is_foreseen() {
    // docs/benchmarks/links.md: 64 MiB at 1 Gbit/s; two ranks 561 to 564 ms, four 847 to 850 ms, two ranks 25 ms apart 586 to 608 ms.
    for (hosts, delay, measured) in [(2, 50e-6, 0.5625), (4, 50e-6, 0.8485), (2, 0.025, 0.597)] {
        let time = all_reduce(&uniform(hosts, 1, 1e9, delay), 64 << 20).time.get();
        assert!(
            near(time, measured, 0.03),
            "{hosts} ranks: {time} s, measured {measured} s"
        );
    }
}

#[test]
fn a_slow_pair_and_a_slow_host_hold_a_ring_up() {
    let text = |pair: &str| {
        format!(
            r#"{{"hosts": [{{"name": "a", "count": 20}}], "local": {{"rate": "100gbit"}}, "between": {{"rate": "10gbit"}} {pair}}}"#
        )
    };
    let even = all_reduce(&Links::from_json(&text("")).unwrap(), 100_000_000);
    let pair = r#", "links": [{"from": "a3", "to": "a4", "rate": "1gbit"}]"#;
    let slow = all_reduce(&Links::from_json(&text(pair)).unwrap(), 100_000_000);
    assert!(
        near(slow.time.get(), 10.0 * even.time.get(), 0.1),
        "{slow:?} {even:?}"
    );
    assert_eq!(slow.sent, even.sent);
}

#[test]
fn formats_cost_what_their_bits_cost() {
    let links = uniform(8, 1, 1e9, 0.0);
    let group = Group::all(&links);
    let time = |format: &str| {
        let format: Format = format.parse().unwrap();
        format
            .average(&Costs::new(&links), &group, 50_000_000)
            .unwrap()
            .time
            .get()
    };
    let plain = time("f32");
    assert!(near(plain / time("int8"), 32.0 / 8.25, 0.02));
    assert!(near(plain / time("int4"), 32.0 / 4.25, 0.02));
}

#[test]
fn tens_of_thousands_of_ranks_are_followed_by_one_host() {
    let links = uniform(2_048, 12, 200e9, 2e-6);
    let cost = all_reduce(&links, 4_000_000_000);
    // Between hosts, and before and behind that in the memory of each.
    let least = 2.0 * 4e9 * 8.0 * (1.0 / 200e9 + 11.0 / 12.0 / 100e9);
    assert!((least..1.1 * least).contains(&cost.time.get()), "{cost:?}");
    // Not alike: too many to follow them all, which is said.
    let pair = r#"{"hosts": [{"name": "a", "count": 4000}], "local": {"rate": 1e11}, "between": {"rate": 1e10},
        "links": [{"from": "a3", "to": "a4", "rate": "1gbit"}]}"#;
    let links = Links::from_json(pair).unwrap();
    let e = Costs::new(&links)
        .of(&Group::all(&links), Operation::AllReduce(Bytes(1 << 30)))
        .unwrap_err();
    assert!(e.message().contains("not alike"), "{e}");
}

/// Two rounds for a bucket of a megabyte between four hosts: its first one goes out ahead, so each waits for one way.
#[test]
fn small_buckets_wait_for_one_way_each_where_ways_are_long() {
    let links = uniform(4, 1, 10e9, 0.02);
    let (costs, group) = (Costs::new(&links), Group::all(&links));
    let time = |bucket| {
        Format::F32
            .in_buckets(&costs, &group, 100 << 18, bucket)
            .unwrap()
            .time
            .get()
    };
    let (small, large) = (time(1 << 18), time(100 << 18));
    assert!((2.0..2.3).contains(&small), "a hundred ways of 20 ms: {small}");
    assert!(
        (0.16..0.19).contains(&large),
        "two ways, and three halves of 105 MB: {large}"
    );
    // Two hosts have one round: nothing is left to wait for.
    let links = uniform(2, 1, 10e9, 0.02);
    let (costs, group) = (Costs::new(&links), Group::all(&links));
    let time = |bucket| {
        Format::F32
            .in_buckets(&costs, &group, 100 << 18, bucket)
            .unwrap()
            .time
            .get()
    };
    assert!(near(time(1 << 18), time(100 << 18), 0.02));
}

/// 26.2 million values in int8, 10 Gbit/s, 20 ms: the bytes alone take 22 ms.
#[test]
fn a_quantised_operation_waits_for_a_way_for_as_many_slices_as_are_under_way() {
    let time = |hosts, bucket| {
        let links = uniform(hosts, 1, 10e9, 0.02);
        let int8: Format = "int8".parse().unwrap();
        let cost = int8.in_buckets(&Costs::new(&links), &Group::all(&links), 100 << 18, bucket);
        cost.unwrap().time.get()
    };
    // 64 slices, 17 at once: four ways.
    let one = time(2, 100 << 18);
    assert!((0.08..0.12).contains(&one), "{one}");
    // A bucket begins when the one before has ended.
    let in_buckets = time(2, 1 << 18);
    assert!((2.0..2.6).contains(&in_buckets), "{in_buckets}");
    // Of several rounds the group below sends only the first one ahead: three ways a slice.
    let of_four = time(4, 100 << 18);
    assert!((3.3..4.0).contains(&of_four), "{of_four}");
}

#[test]
fn over_several_connections_no_operation_goes_ahead_of_another() {
    let next = |connections: u32| {
        let text = format!(
            r#"{{"hosts": [{{"name": "a", "count": 2}}], "local": {{"rate": 1e11}},
            "between": {{"rate": "10gbit", "delay": "20ms"}}, "connections": {connections}}}"#
        );
        let cost = all_reduce(&Links::from_json(&text).unwrap(), 1 << 20);
        (cost.time.get(), cost.next.get())
    };
    let ((time, next_of_one), (_, next_of_four)) = (next(1), next(4));
    assert!(time > 0.02 && next_of_one < 0.001, "{time} {next_of_one}");
    assert_eq!(next_of_four, time);
}

#[test]
fn the_last_bucket_is_paid_for_although_it_is_not_full() {
    let links = uniform(4, 1, 10e9, 0.001);
    let (costs, group) = (Costs::new(&links), Group::all(&links));
    let sent = |values| {
        let cost = Format::F32.in_buckets(&costs, &group, values, 1 << 18).unwrap();
        (cost.sent.0, cost.time.get())
    };
    let ((full, in_full), (more, longer)) = (sent(4 << 18), sent((4 << 18) + (1 << 17)));
    // Half a bucket more than four, but for the headers.
    assert!(near(more as f64, full as f64 * 4.5 / 4.0, 0.01), "{more} {full}");
    assert!(longer > in_full);
}
