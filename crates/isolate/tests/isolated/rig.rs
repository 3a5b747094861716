//! Groups for the tests, and what can be counted of processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Configuration, Device, Epoch, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp,
    Result, Store, Tensor, deadline_in,
};
use oxccl_isolate::{IsolateOptions, IsolatedGroup};

pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

/// Polls until `ready`. For conditions that are not signalled.
pub(crate) fn eventually(what: &str, mut ready: impl FnMut() -> bool) {
    let until = soon();
    while !ready() {
        assert!(Instant::now() < until, "{what} did not happen within 30 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn options(backend: &str) -> IsolateOptions {
    IsolateOptions::new(backend, Device::CPU)
}

/// The misbehaving backend with its orders.
pub(crate) fn odd(orders: &str) -> IsolateOptions {
    let mut o = options("odd");
    o.options.hints.insert("do".into(), orders.into());
    o
}

pub(crate) fn configuration(
    store: &Arc<InMemoryStore>,
    epoch: u64,
    rank: u32,
    world_size: u32,
) -> Configuration {
    let store: Arc<dyn Store> = store.clone();
    Configuration {
        store,
        prefix: format!("test/{epoch}"),
        name: "test".into(),
        epoch: Epoch(epoch),
        rank,
        world_size,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// A group of one rank at epoch 1.
pub(crate) fn alone(options: IsolateOptions) -> IsolatedGroup {
    let group = IsolatedGroup::new(options).unwrap();
    group.configure(configuration(&Arc::default(), 1, 0, 1)).unwrap();
    group
}

pub(crate) fn with_timeout(mut options: IsolateOptions, timeout: Duration) -> IsolateOptions {
    options.options = GroupOptions {
        timeout,
        ..options.options
    };
    options
}

/// Runs `body` on `world` ranks as threads, each with an isolated gloo group at epoch 1.
pub(crate) fn with_gloo(
    world: u32,
    spare: bool,
    body: impl Fn(u32, &IsolatedGroup, &Arc<InMemoryStore>) + Sync,
) {
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (store, body) = (&store, &body);
            scope.spawn(move || {
                let o = IsolateOptions {
                    spare,
                    ..options("gloo")
                };
                let group = IsolatedGroup::new(o).unwrap();
                group.configure(configuration(store, 1, rank, world)).unwrap();
                body(rank, &group, store);
            });
        }
    });
}

/// An all-reduce that must give the right sum.
pub(crate) fn sum(group: &IsolatedGroup, n: usize) -> Result<()> {
    let info = group.info();
    let tensor = Tensor::from_vec(vec![i64::from(info.rank) + 1; n]);
    let sum = group
        .all_reduce(tensor, ReduceOp::Sum)?
        .take_tensor()?
        .into_vec::<i64>()?;
    let want = i64::from(info.world_size * (info.world_size + 1) / 2);
    assert!(
        sum.iter().all(|&x| x == want),
        "{:?} instead of {want}",
        sum.first()
    );
    Ok(())
}

/// The state of a process; `None` if it does not exist.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().next()?.chars().next()
}

/// (process id, state) of all children of this process, zombies too.
pub(crate) fn children() -> Vec<(u32, char)> {
    let me = std::process::id().to_string();
    let of = |entry: std::fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        (fields.next()? == me).then_some((pid, state))
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| of(e.ok()?))
        .collect()
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings and descriptors of our shared memory.
pub(crate) fn memfds() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    maps.matches("memfd:oxccl").count()
        + links
            .filter_map(|l| std::fs::read_link(l.ok()?.path()).ok())
            .filter(|l| l.to_string_lossy().contains("memfd:oxccl"))
            .count()
}

pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        // The one that starts children stays for ever, the clock of all engines until the last deadline that it was told.
        .filter(|name| name.starts_with("ox-") && !matches!(name.trim(), "ox-isolate" | "ox-clock"))
        .count()
}

pub(crate) fn shm_files() -> usize {
    std::fs::read_dir("/dev/shm").map_or(0, |d| {
        d.filter(|f| {
            f.as_ref()
                .is_ok_and(|f| f.file_name().to_string_lossy().contains("oxccl"))
        })
        .count()
    })
}

/// Everything that must not grow: descriptors, our memory, our threads, children, files.
pub(crate) fn nothing_is_left(before: (usize, usize)) {
    eventually("the end of all children", || children().is_empty());
    eventually("the end of all threads", || threads() == 0);
    eventually("the end of all shared memory", || memfds() == 0);
    eventually("the end of all descriptors", || descriptors() <= before.0);
    assert_eq!(shm_files(), before.1);
}

pub(crate) fn before() -> (usize, usize) {
    (descriptors(), shm_files())
}

pub(crate) fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // It may be gone already.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}
