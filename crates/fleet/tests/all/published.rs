//! The model of arXiv 2501.18512 and its table: which rate keeps a replica computing for which share of the time.
//!
//! Two replicas; one device each that computes layer after layer; one line that carries layer after layer. The rules (what a layer's forward pass
//! waits for, when its gradient may leave) are the paper's, and so is the grid of rates on which it looked. It waits layer by layer; what the
//! product does is in `Method`, and waits for the whole fragment.

use std::collections::VecDeque;

use oxccl_fleet::{Costs, Format, Group, Link, Links, Method, Rate, Seconds, Workload, rounds};

/// A model of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Model {
    /// As the table calls it.
    name: &'static str,
    /// Its parameters.
    parameters: f64,
    /// Its layers.
    layers: usize,
    /// Seconds of a step.
    step: f64,
}

/// A column group of the table; inner steps between two exchanges of a parameter: `SYNC_EVERY`, but 1 for data parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    /// All gradients in every step, 16 bits each.
    DataParallel,
    /// All parameters at once, 16 bits.
    Diloco,
    /// Fragments of three layers in turn, 16 bits.
    Streaming,
    /// The same, and one inner step may pass before the result is needed.
    Overlapped,
    /// The same in 4 bits.
    Quantised,
}

impl Scheme {
    /// All, in the order of the table.
    const ALL: [Self; 5] = [
        Self::DataParallel,
        Self::Diloco,
        Self::Streaming,
        Self::Overlapped,
        Self::Quantised,
    ];
}

/// H of the table.
const SYNC_EVERY: usize = 100;
/// Layers of a fragment.
const FRAGMENT: usize = 3;
/// The shares of time spent computing for which the table has a rate.
const SHARES: [f64; 5] = [0.5, 0.8, 0.9, 0.95, 0.99];

/// The models of the table.
const MODELS: [Model; 3] = [
    Model {
        name: "1B",
        parameters: 1e9,
        layers: 24,
        step: 0.1,
    },
    Model {
        name: "10B",
        parameters: 10e9,
        layers: 48,
        step: 0.8,
    },
    Model {
        name: "100B",
        parameters: 100e9,
        layers: 108,
        step: 4.9,
    },
];

/// arXiv 2501.18512, table 4, in Gbit/s: by model, scheme and share.
const TABLE: [[[f64; 5]; 5]; 3] = [
    [
        [86.8, 152.6, 184.2, 222.3, 569.0],
        [1.4, 6.2, 13.3, 23.3, 86.8],
        [1.4, 5.2, 9.1, 16.0, 28.1],
        [1.4, 4.3, 6.2, 9.1, 11.0],
        [0.4, 0.9, 1.7, 2.0, 3.0],
    ],
    [
        [104.8, 222.3, 222.3, 268.3, 471.5],
        [1.7, 7.5, 16.0, 33.9, 104.8],
        [1.7, 5.2, 9.1, 13.3, 19.3],
        [1.7, 3.6, 5.2, 6.2, 7.5],
        [0.4, 0.9, 1.4, 1.4, 1.7],
    ],
    [
        [184.2, 323.8, 390.7, 390.7, 471.5],
        [3.0, 11.0, 23.3, 49.4, 184.2],
        [2.4, 6.2, 9.1, 11.0, 19.3],
        [1.7, 3.6, 4.3, 5.2, 5.2],
        [0.5, 0.9, 1.1, 1.1, 1.4],
    ],
];

/// The rates on which the table looked, in Gbit/s: 50 from 0.1 to 1,000, each 1.2 times the one before.
fn grid() -> Vec<f64> {
    (0..50)
        .map(|i| 10f64.powf(-1.0 + 4.0 * f64::from(i) / 49.0))
        .collect()
}

/// The share of time spent computing, in the steady state, over a line of `gbits` Gbit/s.
fn utilisation(model: &Model, scheme: Scheme, gbits: f64) -> f64 {
    let layers = model.layers;
    let part = model.step / (3.0 * layers as f64);
    let bits = if scheme == Scheme::Quantised { 4.0 } else { 16.0 };
    let transfer = bits * model.parameters / (layers as f64 * gbits * 1e9);
    let late = usize::from(matches!(scheme, Scheme::Overlapped | Scheme::Quantised));
    let fragments = layers.div_ceil(FRAGMENT);
    let leaves = |step: usize, layer: usize| match scheme {
        Scheme::DataParallel => true,
        Scheme::Diloco => step.is_multiple_of(SYNC_EVERY),
        _ => (step + SYNC_EVERY - (layer % fragments) * SYNC_EVERY / fragments).is_multiple_of(SYNC_EVERY),
    };
    let (warm_up, measured) = match scheme {
        Scheme::DataParallel => (10, 20),
        _ => (2 * SYNC_EVERY, 3 * SYNC_EVERY),
    };
    let (mut now, mut line) = (0.0f64, 0.0f64);
    let mut begins = 0.0;
    // By layer: from which step on, and when, its forward pass may begin.
    let mut awaited: Vec<VecDeque<(usize, f64)>> = vec![VecDeque::new(); layers];
    for step in 0..warm_up + measured {
        if step == warm_up {
            begins = now;
        }
        for arrivals in &mut awaited {
            while let Some((_, at)) = arrivals.pop_front_if(|(from, _)| *from <= step) {
                now = now.max(at);
            }
            now += part;
        }
        for (layer, arrivals) in awaited.iter_mut().enumerate().rev() {
            // The input of the first layer needs no gradient.
            now += if layer == 0 { part } else { 2.0 * part };
            if leaves(step, layer) {
                line = line.max(now) + transfer;
                arrivals.push_back((step + 1 + late, line));
            }
        }
    }
    let computing = part * (3 * layers - 1) as f64 * measured as f64;
    computing / (now - begins)
}

/// The place on the `grid` that the table would show: the last rate below the one from which `share` is reached.
fn needed(model: &Model, scheme: Scheme, share: f64) -> usize {
    let grid = grid();
    let enough = grid.partition_point(|rate| utilisation(model, scheme, *rate) < share);
    enough.saturating_sub(1)
}

#[test]
fn the_table_of_streaming_diloco_comes_out_within_one_step_of_its_grid() {
    let grid = grid();
    let (mut exact, mut all) = (0, 0);
    for (model, rows) in MODELS.iter().zip(TABLE) {
        for (scheme, row) in Scheme::ALL.iter().zip(rows) {
            for (share, published) in SHARES.iter().zip(row) {
                let here = needed(model, *scheme, *share);
                // Published in a tenth of a Gbit/s: the nearest of the grid.
                let distance = |i: &usize| (grid[*i] - published).abs();
                let there = (0..grid.len())
                    .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                    .unwrap();
                assert!(
                    here.abs_diff(there) <= 1,
                    "{} {scheme:?} {share}: {:.1} here, {published} published",
                    model.name,
                    grid[here]
                );
                all += 1;
                exact += usize::from(here == there);
            }
        }
    }
    println!("{exact} of {all} rates are the published ones, the others one step of the grid away");
    assert_eq!(all, 75);
}

#[test]
fn more_of_the_line_is_never_worse() {
    for model in &MODELS {
        for scheme in Scheme::ALL {
            let shares: Vec<f64> = grid()
                .iter()
                .step_by(7)
                .map(|r| utilisation(model, scheme, *r))
                .collect();
            assert!(
                shares.is_sorted_by(|a, b| *a <= *b + 1e-9),
                "{} {scheme:?}: {shares:?}",
                model.name
            );
            assert!(shares.iter().all(|s| (0.0..=1.0 + 1e-9).contains(s)));
        }
    }
}

/// Data parallel with 12 ranks on each of so many hosts: ranks of 224 Gbit/s and 1 µs within a host, hosts of 1.6 Tbit/s and 2.2 µs. The model (20
/// million parameters) and its step (240 ms) are chosen so that both points come out; what the report trained is not known here.
#[test]
fn one_model_over_stated_links_comes_to_99_percent_in_a_host_and_92_on_24_576_ranks() {
    let seconds = |s| Seconds::new(s).unwrap();
    let link = |rate, delay| Link::new(Rate::new(rate).unwrap(), seconds(delay));
    let efficiency = |hosts| {
        let links = Links::uniform(hosts, 12, link(224e9, 1e-6), link(1.6e12, 2.2e-6)).unwrap();
        let work = Workload {
            parameters: 20_000_000,
            layers: 24,
            step: seconds(0.24),
            quorum: Seconds::ZERO,
            vote: Seconds::ZERO,
            per_value: Seconds::ZERO,
        };
        let (costs, group) = (Costs::new(&links), Group::all(&links));
        let average = |values| Format::F32.average(&costs, &group, values);
        rounds(Method::Ddp { overlap: true }, &work, average)
            .unwrap()
            .efficiency()
    };
    let (node, all) = (efficiency(1), efficiency(2_048));
    assert!(
        (node - 0.99).abs() < 0.005 && (all - 0.92).abs() < 0.01,
        "{node} {all}"
    );
}
