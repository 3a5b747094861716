//! Worlds of threads over gloo: groups of some ranks, partitions, meshes, and ranks that do not agree.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

// Links the backend, which registers itself.
use backend_gloo as _;
use ftcore::{
    ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Registry, Result, Store,
    Tensor, deadline_in,
};
use oxccl_world::{
    DeviceMesh, GroupKind, GroupSpec, Layout, LayoutSpec, Make, MeshShape, Place, World, WorldOptions,
};

const LONG: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    deadline_in(LONG)
}

/// Runs `body` on every rank; the results in rank order.
fn ranks<T: Send>(world_size: u32, splits: bool, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    let options = WorldOptions {
        split_groups: Some(splits),
        ..WorldOptions::default()
    };
    ranks_with(world_size, &options, body)
}

/// As above, with all options.
fn ranks_with<T: Send>(world_size: u32, options: &WorldOptions, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (store, options, body) = (store.clone(), options.clone(), &body);
                scope
                    .spawn(move || body(World::with_store(store, rank, world_size, options, soon()).unwrap()))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// The sum over the group of each rank's number in the world, which tells who is in it.
fn sum(group: &dyn ProcessGroup, rank: u32) -> f32 {
    let mine = Tensor::from_vec(vec![2f32.powi(rank as i32)]);
    let sum = group
        .all_reduce(mine, ReduceOp::Sum)
        .unwrap()
        .take_tensor()
        .unwrap();
    sum.as_slice::<f32>().unwrap()[0]
}

#[test]
fn a_new_group_has_the_ranks_it_names_in_the_order_it_names_them() {
    for splits in [false, true] {
        let found = ranks(4, splits, |world| {
            let group = world.new_group(&[3, 1], &GroupSpec::default(), soon()).unwrap();
            // The world goes on beside it.
            assert_eq!(sum(world.group(), world.rank()), 15.0);
            let told = group.map(|g| (g.info().rank, g.info().world_size, sum(&*g, world.rank())));
            world.shutdown(soon()).unwrap();
            told
        });
        let wanted = [None, Some((1, 2, 10.0)), None, Some((0, 2, 10.0))];
        assert_eq!(found, wanted, "split: {splits}");
    }
}

#[test]
fn a_group_that_was_made_elsewhere_is_connected_among_the_ranks_that_are_named() {
    let found = ranks(3, false, |world| {
        let options = GroupOptions::default();
        let own = Registry::global()
            .create("gloo", &ftcore::Device::CPU, &options)
            .unwrap();
        let is_in = world.connect(&*own, &[2, 0], soon()).unwrap();
        // The world goes on beside it.
        assert_eq!(sum(world.group(), world.rank()), 7.0);
        is_in.then(|| (own.info().rank, own.info().world_size, sum(&*own, world.rank())))
    });
    assert_eq!(found, [Some((1, 2, 5.0)), None, Some((0, 2, 5.0))]);
    let refused = ranks(2, false, |world| {
        let options = GroupOptions::default();
        let own = Registry::global()
            .create("gloo", &ftcore::Device::CPU, &options)
            .unwrap();
        let mine = [[0, 1], [1, 0]][world.rank() as usize];
        let error = world.connect(&*own, &mine, soon()).unwrap_err();
        // The world goes on.
        assert_eq!(sum(world.group(), world.rank()), 3.0);
        (error.kind(), error.context().peer)
    });
    assert_eq!(
        refused,
        [(ErrorKind::Mismatch, Some(1)), (ErrorKind::Mismatch, Some(0))]
    );
}

#[test]
fn a_partition_is_made_in_one_call_and_groups_of_one_are_valid() {
    for splits in [false, true] {
        let found = ranks(5, splits, |world| {
            let lists = [vec![0, 4], vec![2], vec![1, 3]];
            let group = world
                .split_group(&lists, &GroupSpec::default(), soon())
                .unwrap()
                .unwrap();
            sum(&*group, world.rank())
        });
        assert_eq!(found, [17.0, 10.0, 4.0, 10.0, 17.0], "split: {splits}");
    }
}

#[test]
fn an_empty_partition_leaves_every_rank_without_a_group() {
    for splits in [false, true] {
        let found = ranks(2, splits, |world| {
            let none = world.split_group(&[], &GroupSpec::default(), soon()).unwrap();
            (none.is_none(), sum(world.group(), world.rank()))
        });
        assert_eq!(found, [(true, 3.0); 2], "split: {splits}");
    }
}

/// Options as backends have seen them at the creation of each group.
type Seen = Arc<Mutex<Vec<GroupOptions>>>;

/// A world of two whose backends' options are written down.
fn watched(splits: bool) -> (WorldOptions, Seen) {
    let seen = Seen::default();
    let notes = seen.clone();
    let make: Arc<Make> = Arc::new(move |name, device, options| {
        notes.lock().unwrap().push(options.clone());
        Registry::global().create(name, device, options)
    });
    let options = WorldOptions {
        make,
        split_groups: Some(splits),
        ..WorldOptions::default()
    };
    (options, seen)
}

#[test]
fn what_a_new_group_asks_for_reaches_its_backend_split_or_not() {
    let timeout = Duration::from_secs(7);
    let spec = GroupSpec {
        timeout: Some(timeout),
        name: Some("side".to_string()),
        ..GroupSpec::default()
    };
    for splits in [false, true] {
        let (options, seen) = watched(splits);
        let names = ranks_with(2, &options, |world| {
            let side = world.new_group(&[0, 1], &spec, soon()).unwrap().unwrap();
            assert_eq!(sum(&*side, world.rank()), 3.0);
            side.info().name.to_string()
        });
        assert_eq!(names, ["side", "side"]);
        let timeouts: Vec<Duration> = seen.lock().unwrap().iter().map(|o| o.timeout).collect();
        // Two for the world, two for the group: a split would have kept the world's.
        assert_eq!(
            timeouts.iter().filter(|t| **t == timeout).count(),
            2,
            "split: {splits}"
        );
        assert_eq!(timeouts.len(), 4, "split: {splits}");
    }
}

#[test]
fn a_group_that_asks_for_nothing_is_split_off_where_groups_are_split() {
    for (splits, made) in [(false, 4), (true, 2)] {
        let (options, seen) = watched(splits);
        ranks_with(2, &options, |world| {
            let group = world
                .new_group(&[1, 0], &GroupSpec::default(), soon())
                .unwrap()
                .unwrap();
            assert_eq!(sum(&*group, world.rank()), 3.0);
        });
        assert_eq!(seen.lock().unwrap().len(), made, "split: {splits}");
    }
}

#[test]
fn an_option_that_the_backend_does_not_honour_is_refused_and_the_world_goes_on() {
    let options = GroupOptions {
        min_ctas: Some(4),
        ..GroupOptions::default()
    };
    let spec = GroupSpec {
        options: Some(options),
        ..GroupSpec::default()
    };
    for splits in [false, true] {
        ranks(2, splits, |world| {
            let e = world.new_group(&[0, 1], &spec, soon()).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains("min_ctas"), "{e}");
            assert_eq!(sum(world.group(), world.rank()), 3.0);
        });
    }
}

#[test]
fn l42_a_text_reaches_the_backend_of_the_world_and_of_every_group_made_from_it() {
    // What gloo says of its connections once it has them.
    let transport = |group: &dyn ProcessGroup| {
        let notes = &group.capabilities().notes;
        let found = notes.iter().find(|(what, _)| what == "transport");
        found.map(|(_, how)| how.to_string()).unwrap()
    };
    for (wanted, splits) in [("tcp", false), ("tcp", true), ("shm", false), ("shm", true)] {
        let mut options = WorldOptions {
            split_groups: Some(splits),
            ..WorldOptions::default()
        };
        options.options.set("Transport", wanted).unwrap();
        let seen = ranks_with(2, &options, |world| {
            let plain = GroupSpec::default();
            let new = world.new_group(&[1, 0], &plain, soon()).unwrap().unwrap();
            let split = world.split_group(&[vec![0, 1]], &plain, soon()).unwrap();
            let mut of_its_own = GroupSpec {
                options: Some(GroupOptions::default()),
                ..GroupSpec::default()
            };
            let own = of_its_own.options.as_mut().unwrap();
            own.set("transport", "tcp").unwrap();
            let own = world.new_group(&[0, 1], &of_its_own, soon()).unwrap().unwrap();
            assert_eq!(transport(&*own), "tcp");
            [
                transport(world.group()),
                transport(&*new),
                transport(&*split.unwrap()),
            ]
        });
        assert_eq!(seen, [[wanted; 3]; 2], "split: {splits}");
    }
}

#[test]
fn inv9_what_is_dropped_is_said_by_the_world_and_by_every_group_made_from_it() {
    for splits in [false, true] {
        for backends in ["gloo", "cpu:gloo"] {
            let mut options = WorldOptions {
                split_groups: Some(splits),
                backends: backends.parse().unwrap(),
                ..WorldOptions::default()
            };
            for (name, text) in [("minCtas", "4"), ("nonsense", "1"), ("lenient", "1")] {
                options.options.set(name, text).unwrap();
            }
            let wanted: Vec<String> = ["hint:nonsense", "min_ctas"]
                .iter()
                .map(|name| match backends {
                    "gloo" => name.to_string(),
                    _ => format!("cpu:{name}"),
                })
                .collect();
            ranks_with(2, &options, |world| {
                let new = world.new_group(&[0, 1], &GroupSpec::default(), soon());
                assert_eq!(world.group().info().dropped_options, wanted, "split: {splits}");
                assert_eq!(
                    new.unwrap().unwrap().info().dropped_options,
                    wanted,
                    "split: {splits}"
                );
            });
        }
    }
}

#[test]
fn ranks_that_ask_for_other_backends_are_named_on_every_rank() {
    let found = ranks(2, false, |world| {
        let spec = GroupSpec {
            backends: (world.rank() == 1).then(|| "cpu:gloo".parse().unwrap()),
            ..GroupSpec::default()
        };
        let e = world.new_group(&[0, 1], &spec, soon()).err().unwrap();
        (e.kind(), e.context().peer)
    });
    assert_eq!(
        found,
        [(ErrorKind::Mismatch, Some(1)), (ErrorKind::Mismatch, Some(0))]
    );
}

#[test]
fn ranks_of_which_only_one_splits_are_named_on_both() {
    let named = GroupSpec {
        name: Some("side".to_string()),
        ..GroupSpec::default()
    };
    // By the variable or the option, and by a specification.
    for (splits, spec) in [([true, false], None), ([true, true], Some(named))] {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let on = |rank: u32| {
            let options = WorldOptions {
                split_groups: Some(splits[rank as usize]),
                ..WorldOptions::default()
            };
            let world = World::with_store(store.clone(), rank, 2, options, soon()).unwrap();
            let spec = spec.clone().filter(|_| rank == 1).unwrap_or_default();
            let deadline = soon();
            let e = world.new_group(&[0, 1], &spec, deadline).err().unwrap();
            assert!(Instant::now() < deadline, "it waited for its deadline: {e}");
            let layout = Layout::new(2, LayoutSpec::default()).unwrap();
            let specs = BTreeMap::from([(GroupKind::Data, spec)]);
            let of_layout = world.layout(layout, specs, deadline).err().unwrap();
            // The world goes on.
            assert_eq!(sum(world.group(), rank), 3.0);
            [e, of_layout].map(|e| (e.kind(), e.context().peer))
        };
        let (zero, one) = std::thread::scope(|scope| {
            let one = scope.spawn(|| on(1));
            (on(0), one.join().unwrap())
        });
        assert_eq!(zero, [(ErrorKind::Mismatch, Some(1)); 2], "{splits:?}");
        assert_eq!(one, [(ErrorKind::Mismatch, Some(0)); 2], "{splits:?}");
    }
}

#[test]
fn a_group_that_another_rank_cannot_make_is_waited_for_no_longer_than_the_world_lasts() {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let on = |rank: u32, body: fn(&World) -> ftcore::Error| {
        let made = Mutex::new(0);
        let make: Arc<Make> = Arc::new(move |name, device, options| {
            let mut made = made.lock().unwrap();
            *made += 1;
            // The first is the world's own.
            match (rank, *made) {
                (1, 2) => Err(ftcore::Error::new(ErrorKind::Unavailable, "no memory for it")),
                _ => Registry::global().create(name, device, options),
            }
        });
        let options = WorldOptions {
            make,
            split_groups: Some(false),
            ..WorldOptions::default()
        };
        let world = World::with_store(store.clone(), rank, 2, options, soon()).unwrap();
        let e = body(&world);
        world.group().abort("cannot");
        e
    };
    let new = |world: &World| {
        let new = world.new_group(&[0, 1], &GroupSpec::default(), deadline_in(LONG));
        new.err().unwrap()
    };
    let begun = Instant::now();
    let (zero, one) = std::thread::scope(|scope| {
        let one = scope.spawn(|| on(1, new));
        (on(0, new), one.join().unwrap())
    });
    assert!(begun.elapsed() < LONG / 4, "it waited for its deadline: {zero}");
    assert_eq!(one.kind(), ErrorKind::Unavailable, "{one}");
    assert_eq!(zero.kind(), ErrorKind::Aborted, "{zero}");
    assert!(zero.to_string().contains("cannot"), "{zero}");
}

#[test]
fn what_ended_the_worlds_first_connection_too_late_ends_no_group_that_is_made_later() {
    let options = WorldOptions::default();
    let cancel = options.cancel.clone();
    let sums = ranks_with(2, &options, |world| {
        // Both are connected.
        sum(world.group(), world.rank());
        cancel.cancel(ftcore::Error::new(ErrorKind::Aborted, "too late"));
        let group = world.new_group(&[0, 1], &GroupSpec::default(), soon());
        sum(&*group.unwrap().unwrap(), world.rank())
    });
    assert_eq!(sums, [3.0, 3.0]);
}

#[test]
fn ranks_that_pass_other_lists_are_named_on_every_rank() {
    let found = ranks(3, false, |world| {
        let mine = if world.rank() == 1 {
            vec![0, 1]
        } else {
            vec![0, 1, 2]
        };
        let e = world
            .new_group(&mine, &GroupSpec::default(), soon())
            .err()
            .unwrap();
        // The world is none the worse for it.
        assert_eq!(sum(world.group(), world.rank()), 7.0);
        (e.kind(), e.context().peer)
    });
    let mismatch = |peer| (ErrorKind::Mismatch, Some(peer));
    assert_eq!(found, [mismatch(1), mismatch(0), mismatch(1)]);
    let found = ranks(3, true, |world| {
        let mine = if world.rank() == 1 {
            vec![0, 1]
        } else {
            vec![0, 1, 2]
        };
        world
            .new_group(&mine, &GroupSpec::default(), soon())
            .err()
            .map(|e| e.kind())
    });
    assert_eq!(found, [Some(ErrorKind::Mismatch); 3]);
}

#[test]
fn a_mesh_has_a_group_along_each_dimension_and_joint_ones() {
    let found = ranks(4, false, |world| {
        let shape = MeshShape::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let mesh = DeviceMesh::new(&world, shape, soon()).unwrap();
        let along = |name| {
            let group = mesh.group(name).unwrap();
            assert_eq!(group.info().rank, mesh.coordinate(name).unwrap());
            sum(group, world.rank())
        };
        let all = mesh.joint_group(&world, &["dp", "tp"], soon()).unwrap();
        assert_eq!(mesh.group("pp").err().unwrap().kind(), ErrorKind::NotFound);
        (along("dp"), along("tp"), sum(&*all, world.rank()))
    });
    let wanted = [
        (5.0, 3.0, 15.0),
        (10.0, 3.0, 15.0),
        (5.0, 12.0, 15.0),
        (10.0, 12.0, 15.0),
    ];
    assert_eq!(found, wanted);
    let wrong = ranks(2, false, |world| {
        let shape = MeshShape::new(&[("dp", 3)]).unwrap();
        DeviceMesh::new(&world, shape, soon())
            .err()
            .map(|e| e.to_string())
    });
    assert!(
        wrong.iter().flatten().all(|e| e.contains("3 ranks, the world 2")),
        "{wrong:?}"
    );
}

fn pipeline_of(stages: u32) -> Layout {
    let spec = LayoutSpec {
        pipeline: stages,
        ..LayoutSpec::default()
    };
    Layout::new(stages, spec).unwrap()
}

#[test]
fn a_pair_of_a_pipeline_is_made_by_its_two_ranks_alone() {
    for splits in [false, true] {
        let found = ranks(4, splits, |world| {
            let groups = world.layout(pipeline_of(4), BTreeMap::new(), soon()).unwrap();
            let e = groups.pair(world.rank(), soon()).err().unwrap();
            assert!(
                e.to_string().contains("is not another rank of the pipeline"),
                "{e}"
            );
            let pair = match world.rank() {
                1 => groups.pair(2, soon()).unwrap(),
                2 => groups.pair(1, soon()).unwrap(),
                _ => return None,
            };
            Some((pair.info().rank, sum(&*pair, world.rank())))
        });
        assert_eq!(
            found,
            [None, Some((0, 6.0)), Some((1, 6.0)), None],
            "split: {splits}"
        );
    }
}

#[test]
fn a_group_of_a_layout_has_what_its_specification_asks_for() {
    let (options, seen) = watched(true);
    let timeout = Duration::from_secs(7);
    let spec = GroupSpec {
        timeout: Some(timeout),
        name: Some("stages".to_string()),
        ..GroupSpec::default()
    };
    ranks_with(2, &options, |world| {
        let specs = BTreeMap::from([(GroupKind::Pipeline, spec.clone())]);
        let groups = world.layout(pipeline_of(2), specs, soon()).unwrap();
        let pipeline = groups.group(GroupKind::Pipeline, soon()).unwrap().unwrap();
        assert_eq!(&*pipeline.info().name, "stages");
        assert_eq!(sum(&*pipeline, world.rank()), 3.0);
        assert_eq!(
            sum(
                &*groups.gloo(GroupKind::Pipeline, soon()).unwrap().unwrap(),
                world.rank()
            ),
            3.0
        );
    });
    let timeouts: Vec<Duration> = seen.lock().unwrap().iter().map(|o| o.timeout).collect();
    // On each rank: the world's, the pipeline's and its gloo side.
    assert_eq!(timeouts.len(), 6);
    assert_eq!(timeouts.iter().filter(|t| **t == timeout).count(), 4);
}

#[test]
fn ranks_that_pass_another_layout_are_named_on_every_rank() {
    let found = ranks(2, false, |world| {
        let layout = match world.rank() {
            0 => pipeline_of(2),
            _ => Layout::new(2, LayoutSpec::default()).unwrap(),
        };
        let e = world.layout(layout, BTreeMap::new(), soon()).err().unwrap();
        assert!(e.to_string().contains("did not pass the same layout"), "{e}");
        // The world goes on.
        assert_eq!(sum(world.group(), world.rank()), 3.0);
        (e.kind(), e.context().peer)
    });
    assert_eq!(
        found,
        [(ErrorKind::Mismatch, Some(1)), (ErrorKind::Mismatch, Some(0))]
    );
}

#[test]
fn what_a_world_has_not_is_refused_by_name_before_anybody_is_met() {
    let found = ranks(2, false, |world| {
        let larger = world
            .layout(pipeline_of(3), BTreeMap::new(), soon())
            .err()
            .unwrap();
        assert!(
            larger.to_string().contains("ranks 0 to 2, the world 2 ranks"),
            "{larger}"
        );
        let specs = BTreeMap::from([(GroupKind::HierarchicalContext(0), GroupSpec::default())]);
        let other = world.layout(pipeline_of(2), specs, soon()).err().unwrap();
        assert!(other.to_string().contains("no groups of kind hcp_0"), "{other}");
        (larger.kind(), other.kind())
    });
    assert_eq!(found, [(ErrorKind::InvalidArgument, ErrorKind::NotFound); 2]);
}

#[test]
fn ranks_beside_a_layout_are_in_none_of_its_groups() {
    for splits in [false, true] {
        let found = ranks(3, splits, |world| {
            let spec = LayoutSpec {
                tensor: 2,
                first_rank: 1,
                ..LayoutSpec::default()
            };
            let layout = Layout::new(2, spec).unwrap();
            let groups = world.layout(layout, BTreeMap::new(), soon()).unwrap();
            let group = groups.group(GroupKind::Tensor, soon()).unwrap();
            group.map(|group| sum(&*group, world.rank()))
        });
        assert_eq!(found, [None, Some(6.0), Some(6.0)], "split: {splits}");
    }
}

#[test]
fn a_group_of_a_layout_that_could_not_connect_stays_failed_and_the_others_do_not() {
    ranks(2, false, |world| {
        let groups = world.layout(pipeline_of(2), BTreeMap::new(), soon()).unwrap();
        if world.rank() == 0 {
            let e = groups
                .group(GroupKind::Pipeline, deadline_in(Duration::from_millis(100)))
                .err()
                .unwrap();
            let again = groups.group(GroupKind::Pipeline, soon()).err().unwrap();
            assert_eq!((again.kind(), again.to_string()), (e.kind(), e.to_string()));
        }
        let other = groups.group(GroupKind::Model, soon()).unwrap().unwrap();
        assert_eq!(sum(&*other, world.rank()), 3.0);
    });
}

#[test]
fn wrong_options_are_told_before_anybody_is_met() {
    let folder = tempfile::tempdir().unwrap();
    let meeting = folder.path().join("meeting");
    let url = format!("file://{}?rank=0&world_size=1", meeting.display());
    let place = Place::from_url(&url).unwrap();
    let mut wrong = WorldOptions::default();
    wrong.options.min_ctas = Some(4);
    let e = World::init(&place, wrong, soon()).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    assert!(!meeting.exists());
    World::init(&place, WorldOptions::default(), soon()).unwrap();
}

#[test]
fn ranks_meet_at_a_file_or_at_an_address() {
    let folder = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    for target in [
        format!("file://{}/meeting", folder.path().display()),
        format!("tcp://{address}"),
    ] {
        let sums: Vec<Result<f32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|rank| {
                    let url = format!("{target}?rank={rank}&world_size=2");
                    scope.spawn(move || {
                        let place = Place::from_url(&url)?;
                        let world = World::init(&place, WorldOptions::default(), soon())?;
                        let sum = sum(world.group(), world.rank());
                        world.shutdown(soon())?;
                        Ok(sum)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(sums.iter().all(|s| matches!(s, Ok(3.0))), "{target}: {sums:?}");
    }
}

#[test]
fn a_call_for_a_group_that_another_thread_is_connecting_waits_for_it_until_its_own_deadline() {
    let (connects, connecting) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let (made, gone) = (Mutex::new(0), Mutex::new(gone));
    let make: Arc<Make> = Arc::new(move |name, device, options| {
        let mut made = made.lock().unwrap();
        *made += 1;
        // The first is the world's own. The layout's stands still, as for a member that has not come.
        if *made == 2 {
            connects.send(()).unwrap();
            gone.lock().unwrap().recv().unwrap();
        }
        Registry::global().create(name, device, options)
    });
    let options = WorldOptions {
        make,
        split_groups: Some(false),
        ..WorldOptions::default()
    };
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let world = World::with_store(store, 0, 1, options, soon()).unwrap();
    let layout = Layout::new(1, LayoutSpec::default()).unwrap();
    let groups = world.layout(layout, BTreeMap::new(), soon()).unwrap();
    let group = |deadline| groups.group(GroupKind::Tensor, deadline);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| group(soon()));
        connecting.recv().unwrap();
        let (tell, told) = mpsc::channel();
        scope.spawn(move || tell.send(group(deadline_in(Duration::from_millis(20))).map(drop)));
        let told = told.recv_timeout(Duration::from_secs(30));
        let patient = scope.spawn(|| group(soon()));
        go.send(()).unwrap();
        let error = told.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(
            error.message().contains("is connecting tp-0 of the layout"),
            "{error}"
        );
        let first = first.join().unwrap().unwrap().unwrap();
        let patient = patient.join().unwrap().unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &patient));
        // One that is there takes no time.
        assert!(Arc::ptr_eq(&first, &group(Instant::now()).unwrap().unwrap()));
    });
}
