//! Groups that break the ABI: what they give back twice harms nothing, what they claim is not believed, what they never end is named.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Device, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Store, SubmitOptions, Tensor, deadline_in,
};
use libtest_mimic::Trial;
use oxccl_plugin::load;

use crate::odd::logged;
use crate::ranks::{backend, configuration};
use crate::{Outcome, build, ensure, header, text, trial_in_c};

/// An unconfigured group with this breach.
fn group(breach: &str) -> Outcome<Box<dyn ProcessGroup>> {
    let source = build::root().join("fixtures/c/breach.c");
    let plugin = load(&build::c_plugin("breach", &source, &header::folder(), &[])?).map_err(text)?;
    let options = GroupOptions {
        hints: [("breach".to_string(), breach.to_string())].into(),
        ..Default::default()
    };
    let backend = backend(&plugin, "breach")?;
    backend.factory.create(&Device::CPU, &options).map_err(text)
}

fn configure(group: &dyn ProcessGroup, epoch: u64) -> ftcore::Result<()> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    group.configure(configuration(&store, epoch, 0, 2))
}

fn reduce(group: &dyn ProcessGroup, options: SubmitOptions) -> Result<Vec<f32>, Error> {
    let tensors = vec![Tensor::from_vec(vec![1.5f32; 1000])];
    let op = ReduceOp::Sum;
    let tensor = group
        .run(Collective::AllReduce { tensors, op }, options)?
        .take_tensor()?;
    Ok(tensor.as_slice::<f32>()?.to_vec())
}

/// Many operations in a row succeed, with what they were given, and the log has the words.
fn harmless(breach: &str, words: &str) -> Outcome {
    let group = group(breach)?;
    configure(&*group, 1).map_err(text)?;
    for _ in 0..200 {
        let got = reduce(&*group, SubmitOptions::default()).map_err(text)?;
        ensure!(got == [1.5; 1000], "{got:?}");
    }
    configure(&*group, 2).map_err(text)?;
    drop(group);
    ensure!(
        logged(&["ERROR", "breach", words]),
        "it is not in the log: {words}"
    );
    Ok(())
}

/// After `configure`, the claim is an error with the words, and the group is not configured.
fn not_believed(breach: &str, words: &str) -> Outcome {
    let group = group(breach)?;
    let e = configure(&*group, 7).err().ok_or("it is believed")?;
    ensure!(
        e.kind() == ErrorKind::Protocol && e.to_string().contains(words),
        "{e}"
    );
    ensure!(group.info().world_size == 0, "{:?}", group.info());
    let e = reduce(&*group, SubmitOptions::default())
        .err()
        .ok_or("it goes on")?;
    ensure!(e.kind() == ErrorKind::InvalidState, "{e}");
    Ok(())
}

fn fails(breach: &str, words: &str) -> Outcome {
    let group = group(breach)?;
    configure(&*group, 1).map_err(text)?;
    let e = reduce(&*group, SubmitOptions::default())
        .err()
        .ok_or("it is believed")?;
    ensure!(
        e.kind() == ErrorKind::Protocol && e.to_string().contains(words) && e.to_string().contains("breach"),
        "{e}"
    );
    Ok(())
}

fn never() -> Outcome {
    let group = group("never_completes")?;
    configure(&*group, 1).map_err(text)?;
    let options = || SubmitOptions::by(deadline_in(Duration::from_millis(50)));
    let e = reduce(&*group, options()).err().ok_or("it succeeded")?;
    ensure!(
        e.kind() == ErrorKind::Timeout && e.to_string().contains("plugin breach"),
        "{e}"
    );
    ensure!(
        group
            .error()
            .is_some_and(|e| e.to_string().contains("plugin breach")),
        "{:?}",
        group.error()
    );
    // Each would wait for its deadline and longer, were it not refused.
    let began = Instant::now();
    for _ in 0..100 {
        let e = reduce(&*group, options()).err().ok_or("it succeeded")?;
        ensure!(
            e.kind() == ErrorKind::Poisoned && e.to_string().contains("plugin breach"),
            "{e}"
        );
    }
    ensure!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // It completes now, twice.
    configure(&*group, 2).map_err(text)?;
    ensure!(group.error().is_none(), "{:?}", group.error());
    Ok(())
}

fn no_time() -> Outcome {
    let source = build::root().join("fixtures/c/breach.c");
    let plugin = load(&build::c_plugin("breach", &source, &header::folder(), &[])?).map_err(text)?;
    let options = GroupOptions {
        timeout: Duration::ZERO,
        ..Default::default()
    };
    let made = backend(&plugin, "breach")?.factory.create(&Device::CPU, &options);
    let e = made.err().ok_or("it was made")?;
    ensure!(
        e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("time-out"),
        "{e}"
    );
    Ok(())
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = [
        ("completes_twice", "called complete for an operation"),
        ("completes_again_later", "called complete for an operation"),
        ("releases_twice", "called release for memory"),
        ("releases_again_later", "called release for memory"),
        ("store_released_twice", "called release for a store"),
    ]
    .into_iter()
    .map(|(breach, words)| {
        trial_in_c(
            &format!("breach::one_that_{breach}_is_logged_and_harms_nothing"),
            move || harmless(breach, words),
        )
    })
    .collect();
    for (breach, words) in [
        ("other_rank", "that it is rank 1 of 2 at epoch 7"),
        ("other_world", "that it is rank 0 of 3 at epoch 7"),
        ("other_epoch", "that it is rank 0 of 2 at epoch 8"),
    ] {
        let name = format!("breach::one_configured_that_claims_an_{breach}_is_not_believed");
        trials.push(trial_in_c(&name, move || not_believed(breach, words)));
    }
    for (breach, words) in [
        ("more_contributors", "3 ranks contributed in a group of 2 ranks"),
        ("other_source", "rank 2 sent in a group of 2 ranks"),
        (
            "completes_and_refuses",
            "completed an operation and then refused it",
        ),
    ] {
        let name = format!("breach::an_outcome_with_{breach}_is_not_believed");
        trials.push(trial_in_c(&name, move || fails(breach, words)));
    }
    trials.push(trial_in_c(
        "breach::one_that_never_completes_is_named_and_the_group_refuses_the_next_calls",
        never,
    ));
    trials.push(trial_in_c(
        "breach::a_time_out_of_zero_is_refused_for_every_plugin",
        no_time,
    ));
    trials
}
