//! The commands of the documentation: the training programs know each that a document names. Runs of them are in the other tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use clap::CommandFactory as _;
use documents::{documented, unknown};
use oxccl_examples::compare::CompareArgs;
use oxccl_examples::ddp_replica::DdpArgs;
use oxccl_examples::diloco_replica::DilocoArgs;
use oxccl_examples::program::grammar;

/// The call of one of the programs in a command: the command itself, what `cargo run` starts, or what `oxccl launch` starts.
fn call(words: &[String]) -> Option<(&'static str, Vec<String>)> {
    let known = |word: &String| {
        ["train_diloco", "train_ddp", "compare_diloco"]
            .into_iter()
            .find(|name| name == word)
    };
    let rest = |words: &[String]| {
        words
            .iter()
            .skip_while(|w| *w != "--")
            .skip(1)
            .cloned()
            .collect::<Vec<_>>()
    };
    if words[0] == "cargo" {
        let bin = words.iter().skip_while(|w| *w != "--bin").nth(1)?;
        return known(bin).map(|name| (name, rest(words)));
    }
    let call = if words[0] == "oxccl" {
        rest(words)
    } else {
        words.to_vec()
    };
    let (first, arguments) = call.split_first()?;
    known(first).map(|name| (name, arguments.to_vec()))
}

#[test]
fn every_documented_option_of_a_training_program_is_there() {
    let (mut wrong, mut found) = (Vec::new(), 0);
    for (path, text) in documents::all().unwrap() {
        for command in documented(&text) {
            let Some((name, arguments)) = call(&command.words) else {
                continue;
            };
            let grammar = match name {
                "train_diloco" => grammar::<DilocoArgs>(),
                "train_ddp" => grammar::<DdpArgs>(),
                _ => CompareArgs::command(),
            };
            let place = format!("{path}:{}", command.line);
            found += 1;
            wrong.extend(unknown(&grammar, &arguments).map(|text| format!("{place}: {text}")));
            if command.is_whole {
                let words = std::iter::once(name.to_owned()).chain(arguments);
                wrong.extend(
                    grammar
                        .try_get_matches_from(words)
                        .err()
                        .map(|e| format!("{place}: {e}")),
                );
            }
        }
    }
    assert!(found > 8, "only {found} calls were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
