//! The groups of a layout over gloo: every rank a process, groups split off and configured, against a table worked out by hand.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

// Links the backend, which registers itself.
use backend_gloo as _;
use ftcore::{ProcessGroup, ProcessGroupExt, ReduceOp, Registry, Tensor, deadline_in};
use oxccl_world::{ENV_SPLIT_GROUPS, GroupKind, Layout, LayoutSpec, Make, Place, World, WorldOptions};

const RANKS: u32 = 8;
/// Says in a rank's environment where the ranks meet.
const ENV_MEETING: &str = "OXCCL_TEST_LAYOUT";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(120))
}

/// Tensor 2, context 1, data 2, pipeline 2; whole experts on 2 ranks, two copies of each, each in an optimizer instance of its own.
fn layout() -> Layout {
    let spec = LayoutSpec {
        tensor: 2,
        pipeline: 2,
        expert: 2,
        expert_tensor: Some(1),
        optimizer_instances: 2,
        ..LayoutSpec::default()
    };
    Layout::new(RANKS, spec).unwrap()
}

/// Who is in which group. Ranks that stand in none have none.
fn by_hand() -> BTreeMap<&'static str, Vec<Vec<u32>>> {
    let singles: Vec<Vec<u32>> = (0..RANKS).map(|rank| vec![rank]).collect();
    let tensor = vec![vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]];
    let data = vec![vec![0, 2], vec![1, 3], vec![4, 6], vec![5, 7]];
    let pipeline = vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]];
    let stages = vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
    let copies = vec![vec![0, 1, 4, 5], vec![2, 3, 6, 7]];
    BTreeMap::from([
        ("tp", tensor.clone()),
        ("cp", singles.clone()),
        ("pp", pipeline.clone()),
        ("dp", data.clone()),
        ("dp_cp", data.clone()),
        ("tp_cp", tensor.clone()),
        ("tp_dp", stages.clone()),
        ("tp_dp_cp", stages),
        ("mp", copies.clone()),
        ("embd", pipeline.clone()),
        ("pos_embd", vec![vec![0], vec![1], vec![2], vec![3]]),
        ("ep", tensor.clone()),
        ("ep_tp", singles.clone()),
        ("tp_ep_mp", tensor),
        ("tp_ep_pp", copies.clone()),
        ("ep_dp", data.clone()),
        ("intra_dp_cp", singles.clone()),
        ("intra_ep_dp", singles),
        ("inter_ep_dp", data.clone()),
        ("intra_dist_opt_instance", copies),
        ("gloo dp_cp", data),
        ("pair", pipeline),
    ])
}

/// The group's ranks in the world, in the order of the group, as its collectives say.
fn ranks_of(group: &dyn ProcessGroup, rank: u32) -> Vec<u32> {
    let size = group.info().world_size;
    let sum = group
        .all_reduce(Tensor::from_vec(vec![1u32 << rank]), ReduceOp::Sum)
        .unwrap()
        .take_tensor()
        .unwrap();
    let all = Tensor::from_vec(vec![u32::MAX; size as usize]);
    let all = group
        .all_gather_into(Tensor::from_vec(vec![rank]), all)
        .unwrap()
        .take_tensor()
        .unwrap();
    let all = all.as_slice::<u32>().unwrap().to_vec();
    let first = group.broadcast(Tensor::from_vec(vec![rank]), 0).unwrap();
    let first = first.take_tensor().unwrap();
    assert_eq!(first.as_slice::<u32>().unwrap(), &all[..1]);
    let mask = all.iter().map(|rank| 1u32 << rank).sum::<u32>();
    assert_eq!(sum.as_slice::<u32>().unwrap(), [mask]);
    assert_eq!(all.get(group.info().rank as usize), Some(&rank));
    all
}

/// A rank's process.
fn rank(meeting: &str) {
    let made = Arc::new(AtomicU32::new(0));
    let counted = made.clone();
    let make: Arc<Make> = Arc::new(move |name, device, options| {
        counted.fetch_add(1, Ordering::Relaxed);
        Registry::global().create(name, device, options)
    });
    let options = WorldOptions {
        make,
        ..WorldOptions::default()
    };
    let world = World::init(&Place::from_url(meeting).unwrap(), options, soon()).unwrap();
    let me = world.rank();
    let groups = world.layout(layout(), BTreeMap::new(), soon()).unwrap();
    let mut report = vec![format!("made {}", made.load(Ordering::Relaxed))];
    let mut tell = |name: &str, group: Option<Arc<dyn ProcessGroup>>| {
        let ranks = group.map(|group| ranks_of(&*group, me));
        report.push(format!("{name}: {ranks:?}"));
    };
    for kind in groups.layout().kinds() {
        tell(&kind.to_string(), groups.group(kind, soon()).unwrap());
    }
    tell("gloo dp_cp", groups.gloo(GroupKind::DataContext, soon()).unwrap());
    let (before, after) = groups.layout().pipeline_neighbours(me).unwrap();
    assert_eq!(before, after);
    tell("pair", Some(groups.pair(after, soon()).unwrap()));
    let again = groups.pair(before, soon()).unwrap();
    assert!(Arc::ptr_eq(&again, &groups.pair(after, soon()).unwrap()));
    report.push(format!("made {}", made.load(Ordering::Relaxed)));
    // Rank 0 has the store; no rank needs it any more.
    world.group().barrier().unwrap();
    println!("REPORT {}", report.join("; "));
}

fn start(name: &str, folder: &Path, rank: u32, splits: &str) -> Child {
    let meeting = format!(
        "file://{}/meeting-{splits}?rank={rank}&world_size={RANKS}",
        folder.display()
    );
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ENV_MEETING, meeting)
        .env(ENV_SPLIT_GROUPS, splits)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn every_collective_of_a_layout_sees_the_ranks_of_its_group_split_or_not() {
    if let Ok(meeting) = std::env::var(ENV_MEETING) {
        return rank(&meeting);
    }
    let name = "layout_groups::every_collective_of_a_layout_sees_the_ranks_of_its_group_split_or_not";
    let folder = tempfile::tempdir().unwrap();
    let reports = |splits| -> Vec<String> {
        let processes: Vec<Child> = (0..RANKS)
            .map(|rank| start(name, folder.path(), rank, splits))
            .collect();
        let report = |process: Child| {
            let output = process.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{text}");
            let at = text.find("REPORT ").unwrap();
            text[at + 7..].lines().next().unwrap().to_string()
        };
        processes.into_iter().map(report).collect()
    };
    let table = by_hand();
    // Made before the first group is asked for, and after the last: off, each group is made when it is asked for, and position embeddings' groups are
    // those of four ranks only; on, only the groups of one, the gloo side and the pair are not split off.
    for (splits, first, singles, several) in [("0", 1, 4, 15), ("1", 1, 4, 0)] {
        for (rank, report) in (0..RANKS).zip(reports(splits)) {
            let lines: Vec<&str> = report.split("; ").collect();
            let positions = u32::from(rank < 4);
            let made = 1 + singles + positions + several + 2;
            assert_eq!(lines.first(), Some(&&*format!("made {first}")), "{report}");
            assert_eq!(lines.last(), Some(&&*format!("made {made}")), "{report}");
            let told = &lines[1..lines.len() - 1];
            assert_eq!(told.len(), table.len(), "{report}");
            for line in told {
                let (kind, ranks) = line.split_once(": ").unwrap();
                let wanted = table[kind].iter().find(|group| group.contains(&rank));
                assert_eq!(
                    ranks,
                    format!("{wanted:?}"),
                    "rank {rank}, split {splits}, {kind}"
                );
            }
        }
    }
}
