//! A process that is forked off one with groups: it is refused, and what it does, its end included, reaches neither the parent's peers nor a
//! plugin nor the child process of an isolated group.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::registry::{Backend, OnConflict};
use ftcore::{
    Device, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Registry, Store,
    Tensor, Work,
};
use isolate::IsolateOptions;
use libtest_mimic::Trial;
use oxccl_plugin::open_trusted;

use crate::ranks::{configuration, soon};
use crate::{Outcome, cstore, ensure, text, trial, trial_in_c};

/// Makes this program play the parent, with groups of gloo, of gloo in child processes, or of the plugin that it names.
const SCENE: &str = "OXCCL_TEST_FORKED";
const GLOO: &str = "gloo";
const ISOLATED: &str = "isolated";

/// Plays the parent if it was asked for; its verdict.
pub(crate) fn play_if_asked() -> Option<Outcome> {
    let scene = std::env::var(SCENE).ok()?;
    Some(play(&scene))
}

fn backend_of(scene: &str) -> Outcome<Backend> {
    use backend_gloo as _;
    let registry = Registry::global();
    if is_plugin(scene) {
        let plugin = open_trusted(Path::new(scene)).map_err(text)?;
        plugin.register(registry, OnConflict::Replace).map_err(text)?;
        return registry.get("cstore", None).map_err(text);
    }
    let gloo = registry.get(GLOO, None).map_err(text)?;
    Ok(match scene {
        ISOLATED => isolate::wrap(&gloo, IsolateOptions::new(GLOO, Device::CPU)),
        _ => gloo,
    })
}

fn is_plugin(scene: &str) -> bool {
    !matches!(scene, GLOO | ISOLATED)
}

type Groups = Vec<Box<dyn ProcessGroup>>;

/// On all groups at once.
fn each(groups: &Groups, act: impl Fn(u32, &dyn ProcessGroup) -> Outcome + Sync) -> Outcome {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(groups)
            .map(|(rank, group)| {
                let act = &act;
                scope.spawn(move || act(rank, &**group))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| "a rank panicked".to_string())?)
    })
}

fn begin(group: &dyn ProcessGroup) -> Outcome<Work> {
    let ones = Tensor::from_vec(vec![1.0f32; 10]);
    group.all_reduce(ones, ReduceOp::Sum).map_err(text)
}

fn sum(_: u32, group: &dyn ProcessGroup) -> Outcome {
    let tensor = begin(group)?.take_tensor().map_err(text)?;
    ensure!(tensor.as_slice::<f32>().map_err(text)? == [2.0; 10], "{tensor:?}");
    Ok(())
}

fn play(scene: &str) -> Outcome {
    let backend = backend_of(scene)?;
    let groups: Groups = (0..2)
        .map(|_| {
            backend
                .factory
                .create(&Device::CPU, &GroupOptions::default())
                .map_err(text)
        })
        .collect::<Outcome<_>>()?;
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    each(&groups, |rank, group| {
        group.configure(configuration(&store, 1, rank, 2)).map_err(text)?;
        sum(rank, group)
    })?;
    // For which the plugin would wait, were it shut down: for ever in the child, which has not its thread.
    let pending = groups.first().filter(|_| is_plugin(scene));
    let pending = pending.map(|group| begin(&**group)).transpose()?;
    // SAFETY: the other threads of this process are those of the groups, which the child does not touch, and the allocator's state is
    // consistent in it.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let end = child(groups, &store, (scene == ISOLATED).then_some(&backend));
        if let Err(why) = &end {
            eprintln!("in the child: {why}");
        }
        std::process::exit(i32::from(end.is_err()));
    }
    let mut status = 0;
    // SAFETY: `status` is ours.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(waited == pid && status == 0, "the child ended with {status}");
    if let Some(first) = pending {
        begin(&**groups.last().ok_or("no groups")?)?
            .take()
            .map_err(text)?;
        first.take().map_err(text)?;
    }
    for _ in 0..3 {
        each(&groups, sum)?;
    }
    Ok(())
}

fn child(groups: Groups, store: &Arc<dyn Store>, isolated: Option<&Backend>) -> Outcome {
    if let Some(backend) = isolated {
        // The thread that starts child processes is the parent's: it would be waited for.
        let begun = Instant::now();
        let made = backend.factory.create(&Device::CPU, &GroupOptions::default());
        let e = made.err().ok_or("the child may make a group")?;
        ensure!(
            e.kind() == ErrorKind::InvalidState && e.to_string().contains("forked"),
            "{e}"
        );
        ensure!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }
    for group in &groups {
        let refused = group
            .all_reduce(Tensor::from_vec(vec![1.0f32; 10]), ReduceOp::Sum)
            .err()
            .ok_or("the child may reduce")?;
        ensure!(
            refused.error.kind() == ErrorKind::InvalidState && refused.error.to_string().contains("forked"),
            "{}",
            refused.error
        );
        let e = group
            .configure(configuration(store, 2, 0, 1))
            .err()
            .ok_or("the child may configure")?;
        ensure!(
            e.kind() == ErrorKind::InvalidState && e.to_string().contains("forked"),
            "{e}"
        );
        group.abort("by the child");
        let e = group
            .split(Some(0), 0, soon())
            .err()
            .ok_or("the child may split")?;
        ensure!(
            e.kind() == ErrorKind::InvalidState && e.to_string().contains("forked"),
            "{e}"
        );
        let begun = Instant::now();
        group.shutdown(soon()).map_err(text)?;
        ensure!(
            begun.elapsed() < Duration::from_secs(30),
            "a plugin was shut down"
        );
    }
    drop(groups);
    Ok(())
}

fn plays(scene: &Path) -> Outcome {
    let program = std::env::current_exe().map_err(text)?;
    let output = Command::new(program).env(SCENE, scene).output().map_err(text)?;
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("forked::a_child_is_refused_and_the_parent_goes_on", || {
            plays(Path::new(GLOO))
        }),
        trial(
            "forked::a_child_is_refused_and_the_parent_goes_on_with_its_isolated_groups",
            || plays(Path::new(ISOLATED)),
        ),
        trial_in_c(
            "forked::a_child_is_refused_and_the_parent_goes_on_with_a_plugin",
            || plays(&cstore::plain()?),
        ),
    ]
}
