//! The backend in C: as it is, and polled.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ftcore::{
    Device, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
    deadline_in,
};
use libtest_mimic::Trial;
use oxccl_plugin::{Loaded, load};

use crate::ranks::{backend, configuration, soon, with_ranks};
use crate::{Outcome, build, ensure, header, text, trial_in_c};

fn built(name: &str, defines: &[&str]) -> Outcome<PathBuf> {
    let source = build::root().join("fixtures/c/cstore.c");
    build::c_plugin(name, &source, &header::folder(), defines)
}

/// As it is.
pub(crate) fn plain() -> Outcome<PathBuf> {
    built("cstore", &[])
}

fn opened(name: &str, defines: &[&str]) -> Outcome<Loaded> {
    let opened = load(&built(name, defines)?).map_err(text)?;
    ensure!(
        opened.abi_minor() == oxccl_plugin::abi::MINOR,
        "minor version {}",
        opened.abi_minor()
    );
    Ok(opened)
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial_in_c("cstore::a_backend_in_c_reduces_broadcasts_and_meets", || {
            works(&opened("cstore", &[])?)
        }),
        trial_in_c("cstore::one_without_a_thread_is_polled", || {
            works(&opened("cstore-polled", &["CSTORE_POLLED"])?)
        }),
        trial_in_c(
            "cstore::abort_ends_what_is_pending_and_configure_starts_it_again",
            started_again,
        ),
        trial_in_c(
            "cstore::a_deadline_names_who_was_missing_and_mismatches_name_both_sides",
            failures,
        ),
    ]
}

fn works(plugin: &Loaded) -> Outcome {
    let cstore = backend(plugin, "cstore")?;
    cstore.factory.probe().map_err(text)?;
    ensure!(
        !cstore.factory.capabilities().has(Feature::Borrow),
        "it has no execute"
    );
    for world in [1u32, 2, 3] {
        let results = with_ranks(&cstore, &Device::CPU, world, |rank, group, _| {
            // Larger than one piece of the store, and not a multiple of anything.
            let mine: Vec<f32> = (0..300_001u32).map(|i| (i * (rank + 1)) as f32 * 0.1).collect();
            let op = group
                .all_reduce(Tensor::from_vec(mine), ReduceOp::Sum)
                .map_err(text)?;
            let sum = op
                .take_tensor()
                .map_err(text)?
                .into_vec::<f32>()
                .map_err(|e| text(e.0))?;
            let coalesced = vec![
                Tensor::from_vec(vec![rank as i64]),
                Tensor::from_vec(vec![-7i64, rank as i64]),
            ];
            let op = group
                .all_reduce_coalesced(coalesced, ReduceOp::Max)
                .map_err(text)?;
            let max = op.take().map_err(text)?.tensors;
            let max: Vec<Vec<i64>> = max
                .into_iter()
                .map(|t| t.as_slice::<i64>().unwrap_or_default().to_vec())
                .collect();
            ensure!(
                max == [vec![i64::from(world) - 1], vec![-7, i64::from(world) - 1]],
                "{max:?}"
            );
            group.barrier().map_err(text)?;
            let root = world - 1;
            let op = group
                .broadcast(Tensor::from_vec(vec![rank as i32; 5]), root)
                .map_err(text)?;
            let got = op.take_tensor().map_err(text)?;
            ensure!(
                got.as_slice::<i32>().map_err(text)? == [root as i32; 5],
                "broadcast"
            );
            // The blocking form too, on borrowed memory, which is staged here.
            let mut slice = [f64::from(rank), f64::NAN];
            group.all_reduce_slice(&mut slice, ReduceOp::Min).map_err(text)?;
            ensure!(slice[0] == 0.0 && slice[1].is_nan(), "{slice:?}");
            let refused = group
                .send(Tensor::from_vec(vec![1i32]), 0, 0)
                .err()
                .map(|r| r.error.kind());
            ensure!(
                refused == Some(ErrorKind::Unsupported),
                "{refused:?} for {}, which is not advertised",
                OpKind::Send
            );
            group
                .shutdown(deadline_in(Duration::from_secs(10)))
                .map_err(text)?;
            Ok(sum)
        })?;
        let expected: Vec<f32> = (0..300_001u32)
            .map(|i| (1..world).fold((i as f32) * 0.1, |a, r| a + (i * (r + 1)) as f32 * 0.1))
            .collect();
        for (rank, sum) in results.iter().enumerate() {
            let same = sum.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            ensure!(same && sum.len() == expected.len(), "rank {rank} of {world}");
        }
    }
    Ok(())
}

fn started_again() -> Outcome {
    let cstore = backend(&opened("cstore", &[])?, "cstore")?;
    with_ranks(&cstore, &Device::CPU, 2, |rank, group, store| {
        if rank == 0 {
            // Rank 1 never comes.
            let work = group
                .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
                .map_err(text)?;
            let begin = Instant::now();
            group.abort("enough");
            let e = work.wait(soon()).err().ok_or("it succeeded")?;
            ensure!(
                e.kind() == ErrorKind::Aborted && e.to_string().contains("enough"),
                "{e:?}"
            );
            // 100 ms are promised; the rest is for a busy machine.
            ensure!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
            ensure!(work.recover().len() == 1, "the tensor did not come back");
            let refused = group
                .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
                .err();
            let kind = refused.map(|r| (r.error.kind(), r.op.into_tensors().len()));
            ensure!(kind == Some((ErrorKind::Poisoned, 1)), "{kind:?}");
            ensure!(
                group.error().is_some_and(|e| e.kind() == ErrorKind::Aborted),
                "{:?}",
                group.error()
            );
            store.set("rank 0 is through", b"", soon()).map_err(text)?;
        } else {
            // Its next configuration would be a leave to rank 0, which is to fail for its own reason.
            store.wait(&["rank 0 is through"], soon()).map_err(text)?;
        }
        let stale = group
            .configure(configuration(store, 1, rank, 2))
            .err()
            .map(|e| e.kind());
        ensure!(stale == Some(ErrorKind::InvalidArgument), "{stale:?}");
        group.configure(configuration(store, 2, rank, 2)).map_err(text)?;
        ensure!(group.error().is_none(), "{:?}", group.error());
        ensure!(
            group.info().epoch.0 == 2 && &*group.info().name == "ranks",
            "{:?}",
            group.info()
        );
        let work = group
            .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
            .map_err(text)?;
        let sum = work.take_tensor().map_err(text)?;
        ensure!(sum.as_slice::<f32>().map_err(text)? == [2.0], "{sum:?}");
        Ok(())
    })
    .map(drop)
}

fn failures() -> Outcome {
    let cstore = backend(&opened("cstore", &[])?, "cstore")?;
    let errors = with_ranks(&cstore, &Device::CPU, 2, |rank, group, _| {
        let count = 3 + rank as usize;
        let tensor = Tensor::from_vec(vec![1.0f64; count]);
        let work = group.all_reduce(tensor, ReduceOp::Sum).map_err(text)?;
        let error = work.take().err().ok_or("it succeeded")?;
        ensure!(error.kind() == ErrorKind::Mismatch, "{error:?}");
        Ok(error.to_string())
    })?;
    ensure!(
        errors
            .iter()
            .all(|e| e.contains("3 elements") && e.contains("4 elements")),
        "{errors:?}"
    );
    with_ranks(
        &cstore,
        &Device::CPU,
        2,
        |rank, group: &dyn ProcessGroup, store| {
            if rank == 1 {
                // Here, and silent.
                return store.barrier("over", 2, soon()).map_err(text);
            }
            let options = SubmitOptions::by(deadline_in(Duration::from_millis(150)));
            let tensors = vec![Tensor::from_vec(vec![1i32])];
            let op = ftcore::Collective::AllReduce {
                tensors,
                op: ReduceOp::Sum,
            };
            let e = group.run_blocking(op, options).err().ok_or("it succeeded")?;
            ensure!(
                e.error.kind() == ErrorKind::Timeout && e.error.context().peer == Some(1),
                "{:?}",
                e.error
            );
            ensure!(e.tensors.len() == 1, "the tensor did not come back");
            store.barrier("over", 2, soon()).map_err(text)
        },
    )
    .map(drop)?;
    // One that leaves is known to have left: no rank waits out a deadline for it.
    with_ranks(&cstore, &Device::CPU, 2, |rank, group: &dyn ProcessGroup, _| {
        if rank == 1 {
            return Ok(());
        }
        let work = group
            .all_reduce(Tensor::from_vec(vec![1i32]), ReduceOp::Sum)
            .map_err(text)?;
        let e = work.take().err().ok_or("it succeeded")?;
        ensure!(
            e.kind() == ErrorKind::PeerLost && e.context().peer == Some(1),
            "{e:?}"
        );
        Ok(())
    })
    .map(drop)
}
