//! What the other ranks hear when a rank ends its group and goes: the program that told it to end may end its process at once, and the child with it.

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Configuration, DType, Epoch, Error, ErrorKind, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Result, Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor, deadline_in,
};
use oxccl_isolate::{IsolateOptions, IsolatedGroup};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::*;

pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "endings::a_process_that_ends_right_after_it_has_ended_a_group_leaves_nothing_unsaid",
        last_notice,
    ),
    (
        "endings::ranks_of_a_backend_that_tells_nobody_hear_of_them_too",
        last_notice_of_a_library,
    ),
    (
        "endings::the_last_notice_of_a_process_counts_even_where_its_end_is_seen_before_it",
        words_behind_the_end,
    ),
    ("endings::an_abort_lets_go_of_a_caller_that_is_sending", sending),
    ("endings::a_process_that_ends_without_a_word_is_a_death", no_words),
    (
        "endings::l32_what_failed_first_is_told_whatever_its_rank_does_next",
        first_cause,
    ),
    (
        "endings::a_split_group_that_is_dropped_with_work_pending_fails_on_all_ranks",
        part_dropped,
    ),
    (
        "endings::work_that_needs_a_rank_which_has_left_does_not_wait_for_its_deadline",
        left_before,
    ),
];

/// An abort while another thread is in the middle of an order that the child has not read yet.
const BEHIND: &str = "aborted behind a long order";
/// Receives in that order: more than fit into a socket.
const LONG: u32 = 8000;

/// What a process of its own does before it ends, and where the store is.
const SCENE: &str = "OXCCL_ISOLATE_TEST_SCENE";
const STORE: &str = "OXCCL_ISOLATE_TEST_STORE";

/// A store to and from which the words of the watch over the other ranks take a while: longer than a child that is killed, or than what a
/// rank is waited for whose process has ended.
struct Far(Arc<dyn Store>);

const FAR: Duration = Duration::from_millis(90);

fn travel(key: &str) {
    if key.ends_with("/failure") || key.ends_with("/left") {
        std::thread::sleep(FAR);
    }
}

impl Store for Far {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        travel(key);
        self.0.set(key, value, deadline)
    }
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.0.get(key, deadline)
    }
    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.0.add(key, amount, deadline)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        travel(key);
        self.0.compare_set(key, expected, desired, deadline)
    }
    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        self.0.check(keys, deadline)
    }
    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        let reached = self.0.wait(keys, deadline);
        keys.iter().for_each(|key| travel(key));
        reached
    }
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        self.0.delete(key, deadline)
    }
    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.0.append(key, value, deadline)
    }
    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.0.multi_get(keys, deadline)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        self.0.multi_set(pairs, deadline)
    }
    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        self.0.num_keys(deadline)
    }
    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        self.0.list(deadline)
    }
    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.0.barrier(key, world_size, deadline)
    }
}

/// A rank of two, configured over the store at `address`.
fn rank_of_two(options: IsolateOptions, address: &str, rank: u32, is_far: bool) -> IsolatedGroup {
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, soon()).unwrap());
    let store = match is_far {
        true => Arc::new(Far(store)),
        false => store,
    };
    let group = IsolatedGroup::new(options).unwrap();
    let configuration = Configuration {
        store,
        prefix: "endings".into(),
        name: "endings".into(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
        cancel: Default::default(),
    };
    group.configure(configuration).unwrap();
    group
}

fn backend_of(scene: &str) -> IsolateOptions {
    match scene.starts_with("library: ") {
        true => odd("hang"),
        false => options("gloo"),
    }
}

fn signal(child: u32, signal: Signal) {
    let child = i32::try_from(child).unwrap();
    kill_process(Pid::from_raw(child).unwrap(), signal).unwrap();
}

/// A thread in the middle of an order that the child does not read: it is stopped.
fn stuck<'scope>(
    scope: &'scope Scope<'scope, '_>,
    group: &'scope IsolatedGroup,
) -> ScopedJoinHandle<'scope, ()> {
    signal(group.child_pid().unwrap(), Signal::STOP);
    let (tell, told) = std::sync::mpsc::channel();
    let thread = scope.spawn(move || {
        let receive = |tag| Collective::Recv {
            tensor: Tensor::zeros(DType::U8, 1),
            peer: Some(1),
            tag,
        };
        let ops = (0..LONG).map(receive).collect();
        tell.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        let _ = group.run(Collective::Batch { ops }, SubmitOptions::default());
    });
    let sending = format!("/proc/self/task/{}/stat", told.recv().unwrap());
    let sleeps = || std::fs::read_to_string(&sending).is_ok_and(|s| s.contains(") S "));
    eventually("a full socket", || {
        (0..20).all(|_| {
            std::thread::sleep(Duration::from_millis(1));
            sleeps()
        })
    });
    thread
}

/// The process of rank 0: ends its group as the scene says, and itself at once.
pub(crate) fn as_quitter() -> Option<ExitCode> {
    let scene = std::env::var(SCENE).ok()?;
    let group = rank_of_two(backend_of(&scene), &std::env::var(STORE).unwrap(), 0, true);
    let act = scene.trim_start_matches("library: ");
    let split = |group: &IsolatedGroup| group.split(Some(0), 0, soon()).unwrap().unwrap();
    let byte = || Tensor::zeros(DType::U8, 1);
    match act {
        "dropped" => drop(group),
        "dropped busy" => {
            let _work = group.all_reduce(byte(), ReduceOp::Sum).unwrap();
            drop(group);
        }
        "aborted" => {
            group.abort("it ends");
            std::mem::forget(group);
        }
        BEHIND => std::thread::scope(|scope| {
            let child = group.child_pid().unwrap();
            let _sending = stuck(scope, &group);
            group.abort("it ends");
            // A child that comes late, not one that is stuck.
            std::thread::sleep(Duration::from_millis(150));
            signal(child, Signal::CONT);
            std::process::exit(0)
        }),
        "part dropped" => {
            drop(split(&group));
            std::mem::forget(group);
        }
        "part dropped busy" => {
            let part = split(&group);
            let _work = part.recv(byte(), 1, 1).unwrap();
            drop(part);
            std::mem::forget(group);
        }
        "part aborted" => {
            let part = split(&group);
            part.abort("it ends");
            std::mem::forget((part, group));
        }
        "whole dropped" => {
            let part = split(&group);
            drop(group);
            std::mem::forget(part);
        }
        "nothing" => std::mem::forget(group),
        "killed" => kill(std::process::id()),
        other => panic!("{other}"),
    }
    std::process::exit(0)
}

/// Rank 1, beside a process that plays `scene`: what its pending work fails with.
fn heard(scene: &str) -> Error {
    heard_over(scene, false)
}

fn heard_over(scene: &str, is_far: bool) -> Error {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().to_string();
    let mut quitter = Command::new(std::env::current_exe().unwrap())
        .env(SCENE, scene)
        .env(STORE, &address)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let group = rank_of_two(backend_of(scene), &address, 1, is_far);
    let splits = scene.contains("part") || scene.contains("whole");
    let part = splits.then(|| group.split(Some(0), 1, soon()).unwrap().unwrap());
    let byte = Tensor::zeros(DType::U8, 1);
    let joined: &dyn ProcessGroup = match &part {
        Some(part) if scene.contains("part") => part.as_ref(),
        _ => &group,
    };
    let error = match joined.recv(byte, 0, 0) {
        Ok(work) => work.wait(soon()).unwrap_err(),
        // It may have heard already, and refuses all since.
        Err(rejected) => joined.error().unwrap_or(rejected.error),
    };
    let status = quitter.wait().unwrap();
    assert_eq!(status.success(), scene != "killed", "{scene}: {status}");
    error
}

fn last_notice() {
    let scenes = [
        ("dropped", "left"),
        ("aborted", "it ends"),
        ("part dropped", "left"),
        ("part dropped busy", "the group was dropped"),
        ("part aborted", "it ends"),
        ("whole dropped", "left"),
    ];
    for (scene, said) in scenes.iter().cycle().take(5 * scenes.len()) {
        let error = heard(scene);
        assert!(error.to_string().contains(said), "{scene}: {error}");
    }
    // A child has half a second for its words, of which little is left here on a machine that is busy.
    let late: Vec<_> = (0..5).map(|_| heard(BEHIND).to_string()).collect();
    let told = late.iter().filter(|e| e.contains("it ends")).count();
    assert!(told >= 3, "{BEHIND}: {late:?}");
}

fn last_notice_of_a_library() {
    let scenes = [
        ("library: dropped", "left the group, which still needed it"),
        ("library: dropped busy", "the group was dropped"),
        ("library: aborted", "it ends"),
        ("library: part aborted", "it ends"),
    ];
    for (scene, said) in scenes.iter().cycle().take(3 * scenes.len()) {
        let error = heard(scene);
        assert!(error.to_string().contains(said), "{scene}: {error}");
    }
}

/// The end of rank 0's process is seen at once; the thread that waits for notice returns later than such a rank is waited for.
fn words_behind_the_end() {
    let scenes = [
        ("library: dropped busy", "the group was dropped"),
        ("library: aborted", "it ends"),
        ("library: part aborted", "it ends"),
    ];
    for (scene, said) in scenes.iter().cycle().take(2 * scenes.len()) {
        let error = heard_over(scene, true);
        assert!(error.to_string().contains(said), "{scene}: {error}");
    }
}

/// Long before the child is killed, which takes half a second.
fn sending() {
    with_gloo(2, false, |rank, group, store| {
        if rank == 1 {
            return store.wait(&["ended"], soon()).unwrap();
        }
        let child = group.child_pid().unwrap();
        std::thread::scope(|scope| {
            let sending = stuck(scope, group);
            group.abort("enough");
            sending.join().unwrap();
            assert_eq!(
                state_of(child),
                Some('T'),
                "it was released by the end of the child"
            );
        });
        store.set("ended", b"", soon()).unwrap();
    });
}

fn no_words() {
    for scene in ["nothing", "killed"].iter().cycle().take(8) {
        let error = heard(scene);
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{scene}: {error}");
        assert!(!error.to_string().contains("left"), "{scene}: {error}");
    }
}

/// Rank 0's library times out, and rank 0 does what a program does then, before another rank has looked.
fn first_cause() {
    for (orders, next) in [
        ("late", "drop"),
        ("late", "abort"),
        ("late", "configure"),
        ("late beside another", "drop"),
        ("late beside another", "abort"),
    ] {
        let store = Arc::new(InMemoryStore::new());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let group = IsolatedGroup::new(odd("hang")).unwrap();
                group.configure(configuration(&store, 1, 1, 2)).unwrap();
                let work = group
                    .all_reduce(Tensor::zeros(DType::U8, 1), ReduceOp::Sum)
                    .unwrap();
                store.set("begun", b"", soon()).unwrap();
                work.wait(soon()).unwrap_err()
            });
            let group = IsolatedGroup::new(odd(orders)).unwrap();
            group.configure(configuration(&store, 1, 0, 2)).unwrap();
            store.wait(&["begun"], soon()).unwrap();
            let begin = || group.all_reduce(Tensor::zeros(DType::U8, 1), ReduceOp::Sum);
            let work = begin().unwrap();
            let _pending = (orders == "late beside another").then(|| begin().unwrap());
            let own = work.wait(soon()).unwrap_err();
            assert_eq!(own.kind(), ErrorKind::Timeout, "{own}");
            match next {
                "abort" => group.abort("gave up"),
                "configure" => group.configure(configuration(&store, 2, 0, 1)).unwrap(),
                _ => drop(group),
            }
            let heard = other.join().unwrap();
            assert_eq!(
                (heard.kind(), heard.context().peer),
                (ErrorKind::Timeout, Some(0)),
                "{orders}, {next}: {heard}"
            );
            assert!(heard.to_string().contains("the library gave up"), "{heard}");
        });
    }
}

/// Of three ranks whose backend tells no rank, rank 0 has left before rank 1 asks for anything of it.
fn left_before() {
    let store = Arc::new(InMemoryStore::new());
    let join = |rank| {
        let group = IsolatedGroup::new(odd("hang")).unwrap();
        group.configure(configuration(&store, 1, rank, 3)).unwrap();
        group
    };
    std::thread::scope(|scope| {
        let (leaves, stays) = (scope.spawn(|| join(0)), scope.spawn(|| join(2)));
        let group = join(1);
        let byte = || Tensor::zeros(DType::U8, 1);
        let message = group.recv(byte(), 2, 0).unwrap();
        let (leaves, _stays) = (leaves.join().unwrap(), stays.join().unwrap());
        let child = leaves.child_pid().unwrap();
        drop(leaves);
        eventually("the end of rank 0's child", || state_of(child).is_none());
        // Longer than what a rank that left is waited for.
        let waited = message.wait(deadline_in(Duration::from_millis(2600)));
        assert!(waited.is_err() && group.error().is_none(), "{:?}", group.error());
        let error = group
            .all_reduce(byte(), ReduceOp::Sum)
            .unwrap()
            .wait(soon())
            .unwrap_err();
        assert_eq!(
            (error.kind(), error.context().peer),
            (ErrorKind::PeerLost, Some(0)),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("left the group, which still needed it"),
            "{error}"
        );
    });
}

fn part_dropped() {
    with_gloo(2, false, |rank, group, store| {
        let part = group.split(Some(0), rank, soon()).unwrap().unwrap();
        let work = part.recv(Tensor::zeros(DType::U8, 1), 1 - rank, 1).unwrap();
        store.barrier("pending", 2, soon()).unwrap();
        if rank == 0 {
            drop(part);
        }
        let error = work.wait(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted, "rank {rank}: {error}");
        assert!(
            error.to_string().contains("the group was dropped"),
            "rank {rank}: {error}"
        );
        // The others of its child are none the worse.
        sum(group, 100).unwrap();
    });
}
