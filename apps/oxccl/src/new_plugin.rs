//! `oxccl new-plugin`: writes a backend of one's own, outside this tree, that passes the conformance suite as it is.

use std::fs;
use std::path::{Path, PathBuf};

use oxccl::core::{Error, Result};

use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  A backend in C, in the folder acme:
    oxccl new-plugin acme --language c
    make -C acme test

  The same in Rust, against a checkout of oxccl:
    oxccl new-plugin acme --language rust --oxccl ~/oxccl
    (cd acme && cargo test)

As written it all-reduces f32 sums through the rendezvous store and passes `oxccl conformance`. What a plugin has to do is in docs/plugins.md.";

/// Write a new plugin that passes the conformance suite as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The backend's name: lower-case letters, digits and `_`, a letter first.
    name: String,
    /// In which language.
    #[arg(long, value_enum)]
    language: Language,
    /// The folder to make [default: NAME].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// A checkout of oxccl, for Rust [default: the one that this command was built from].
    #[arg(long, value_name = "DIR")]
    oxccl: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Language {
    C,
    Rust,
}

/// A file of a template: its path and its text, both with `acme` where the name belongs.
type File = (&'static str, &'static str);

const C: &[File] = &[
    ("acme.c", include_str!("../templates/plugin-c/acme.c")),
    ("oxccl_plugin.h", oxccl::plugin::HEADER),
    ("Makefile", include_str!("../templates/plugin-c/Makefile")),
    ("README.md", include_str!("../templates/plugin-c/README.md")),
];

const RUST: &[File] = &[
    (
        "Cargo.toml",
        include_str!("../templates/plugin-rust/Cargo.toml.template"),
    ),
    ("src/lib.rs", include_str!("../templates/plugin-rust/lib.rs")),
    (
        "tests/conformance.rs",
        include_str!("../templates/plugin-rust/conformance.rs"),
    ),
    ("README.md", include_str!("../templates/plugin-rust/README.md")),
];

/// Where the template has the name.
const NAME: &str = "acme";
/// Where it has the checkout.
const CHECKOUT: &str = "@OXCCL@";

/// What no crate can be called: words of the language, and the standard library's crates.
const TAKEN: &str = " abstract alloc as async await become box break const continue core crate do dyn else enum extern false final fn \
                     for gen if impl in let loop macro match mod move mut override priv proc_macro pub ref return self static std \
                     struct super test trait true try type typeof unsafe unsized use virtual where while yield ";

fn check_name(name: &str, language: Language) -> Result<()> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase());
    if !begins || !name.chars().all(plain) || name.len() > 48 {
        return Err(Error::invalid(format!(
            "'{}' cannot be the name of a plugin: use 1 to 48 lower-case letters, digits and '_', a letter first",
            name.escape_debug()
        )));
    }
    if language == Language::Rust && TAKEN.contains(&format!(" {name} ")) {
        return Err(Error::invalid(format!(
            "'{name}' cannot be the name of a Rust crate; take another one"
        )));
    }
    Ok(())
}

/// The folder of a checkout. Errors: `InvalidArgument` if it is none.
fn checkout(named: Option<&Path>) -> Result<PathBuf> {
    let built_from = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let folder = named.unwrap_or(built_from);
    let there = folder.join("crates/plugin/Cargo.toml").is_file();
    match fs::canonicalize(folder).ok().filter(|_| there) {
        Some(folder) => Ok(folder),
        None => Err(Error::invalid(format!(
            "{} is not a checkout of oxccl; name one with --oxccl DIR",
            folder.display()
        ))),
    }
}

/// Errors: `InvalidArgument` if something is there already.
fn make_folder(folder: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("make the folder {}", folder.display()), e);
    fs::create_dir_all(folder).map_err(failed)?;
    if fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(Error::invalid(format!(
            "the folder {} is not empty; name another one with --dir DIR",
            folder.display()
        )));
    }
    Ok(())
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { name, language, .. } = arguments;
    check_name(&name, language)?;
    let (files, root) = match language {
        Language::C => (C, PathBuf::new()),
        Language::Rust => (RUST, checkout(arguments.oxccl.as_deref())?),
    };
    let root = root.to_str().filter(|root| !root.contains(['"', '\\']));
    let root = root.ok_or_else(|| Error::invalid("the path of the checkout cannot stand in a Cargo.toml"))?;
    let folder = arguments.dir.unwrap_or_else(|| PathBuf::from(&name));
    make_folder(&folder)?;
    let mut said = String::new();
    for (path, text) in files {
        let path = folder.join(path.replace(NAME, &name));
        let failed = |e| Error::io(format!("write {}", path.display()), e);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        let text = text.replace(NAME, &name).replace(CHECKOUT, root);
        fs::write(&path, text).map_err(failed)?;
        said += &format!("{}\n", path.display());
    }
    let folder = folder.display();
    said += &match language {
        Language::C => format!("next: make -C {folder} test\n"),
        Language::Rust => format!("next: (cd {folder} && cargo test)\n"),
    };
    crate::results::write(&said)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_must_fit_files_and_crates() {
        for good in ["acme", "a", "my_ccl2"] {
            assert!(check_name(good, Language::Rust).is_ok(), "{good}");
        }
        for bad in ["", "Acme", "2acme", "my-ccl", "../x", "a b", "é"] {
            assert!(check_name(bad, Language::C).is_err(), "{bad}");
        }
        assert!(check_name("match", Language::Rust).is_err() && check_name("match", Language::C).is_ok());
    }

    #[test]
    fn what_is_no_checkout_is_refused_with_what_to_do() {
        let error = checkout(Some(Path::new("/nowhere"))).unwrap_err();
        assert!(error.to_string().contains("--oxccl DIR"), "{error}");
        assert!(checkout(None).is_ok());
    }
}
