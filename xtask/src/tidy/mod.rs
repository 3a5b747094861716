//! The rules of the house, checked on every run of continuous integration.
//!
//! `stairs` reads `cargo metadata`; `files` and `rules` read the sources, which `lexer` has split into code, string
//! literals and test parts; `variables` compares them with the documentation; `lessons` finds the regression tests; `lines` counts;
//! `words` knows the terms of the field, `links` where the documentation points, `width` how long its lines are, `commands` what its commands name,
//! `programs` which examples its programs are, `starts` which types need one, `circles` who imports whom.
//! Each rule is a pure function that returns findings; this module collects and prints them.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::matrix;
use crate::metadata::Metadata;
use lexer::Source;

mod circles;
mod commands;
mod files;
mod lessons;
mod lexer;
mod lines;
mod links;
mod programs;
mod rules;
mod stairs;
mod starts;
mod variables;
mod width;
mod words;

/// One thing that is against a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// From the workspace root.
    path: String,
    /// From 1; 0 means the whole file.
    line: usize,
    rule: &'static str,
    text: String,
}

impl Finding {
    fn new(path: &str, line: usize, rule: &'static str, text: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            rule,
            text: text.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": [{}] {}", self.rule, self.text)
    }
}

/// Checks all rules and prints what is against them. True if nothing is.
pub(crate) fn check() -> Result<bool> {
    let metadata = Metadata::read()?;
    let sources = read_sources(&metadata)?;
    let documents = read_documents(&metadata.workspace_root)?;
    let mut findings = stairs::check(&metadata);
    for package in &metadata.packages {
        let manifest = relative(&metadata.workspace_root, &package.manifest_path);
        let text = read(&package.manifest_path)?;
        findings.extend(files::check_manifest(&manifest, &text));
    }
    for manifest in manifests(&metadata.workspace_root)? {
        let beside = manifest.with_file_name("README.md");
        let readme = beside.exists().then(|| read(&beside)).transpose()?;
        let path = relative(&metadata.workspace_root, &manifest);
        findings.extend(files::check_readme(&path, &read(&manifest)?, readme.as_deref()));
    }
    for source in &sources {
        findings.extend(files::check(source));
        findings.extend(rules::check(source));
        findings.extend(programs::check_length(source));
    }
    findings.extend(words_of_the_tree(&metadata.workspace_root)?);
    let names = commands::Names::of(
        &metadata,
        matrix::ROWS.iter().map(|r| r.name).collect(),
        crate::grammar(),
    );
    let beside = readmes(&metadata.workspace_root)?;
    let history = metadata.workspace_root.join("CHANGELOG.md");
    let history = (relative(&metadata.workspace_root, &history), read(&history)?);
    for (path, text) in documents.iter().chain(&beside).chain([&history]) {
        findings.extend(width::check(path, text));
    }
    let text_of = |file: &str| read(&metadata.workspace_root.join(file)).ok();
    let mut runs = commands::runs::Runs::default();
    for (path, text) in documents.iter().chain(&beside) {
        findings.extend(commands::check(path, text, &names, |path| {
            metadata.workspace_root.join(path).exists()
        }));
        findings.extend(runs.check(path, text));
    }
    findings.extend(runs.check_table(text_of));
    for (path, text) in &documents {
        findings.extend(programs::check(path, text, text_of));
    }
    findings.extend(links::check(&documents, |path| {
        metadata.workspace_root.join(path).exists()
    }));
    let texts: Vec<&str> = documents.iter().map(|(_, text)| text.as_str()).collect();
    findings.extend(variables::check(&sources, &texts.join("\n")));
    findings.extend(lessons::check(&sources));
    findings.extend(starts::check(&sources));
    findings.extend(circles::check(&sources));
    findings.sort();
    for finding in &findings {
        println!("{finding}");
    }
    println!(
        "tidy: {} packages, {} source files, {} findings",
        metadata.packages.len(),
        sources.len(),
        findings.len()
    );
    Ok(findings.is_empty())
}

/// Prints the lessons that have a regression test, and those that have none.
pub(crate) fn print_lessons() -> Result<bool> {
    let metadata = Metadata::read()?;
    print!("{}", lessons::table(&read_sources(&metadata)?));
    Ok(true)
}

/// Prints the words of sources and documentation for which there is another term. True if there are none.
pub(crate) fn check_words() -> Result<bool> {
    let findings = words_of_the_tree(&Metadata::read()?.workspace_root)?;
    for finding in &findings {
        println!("{finding}");
    }
    println!("words: {} findings", findings.len());
    Ok(findings.is_empty())
}

/// Checks the words of every source, in whatever language, and of every document but the history.
fn words_of_the_tree(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for extension in ["rs", "py", "pyi", "c", "h", "html", "md"] {
        let mut paths = Vec::new();
        collect(root, extension, &mut paths)?;
        for path in paths {
            let (name, text) = (relative(root, &path), read(&path)?);
            match extension {
                "md" if name == "CHANGELOG.md" => {}
                "md" => findings.extend(words::check(&name, &text)),
                _ => findings.extend(words::check_source(&name, &text)),
            }
        }
    }
    Ok(findings)
}

/// Prints how many lines of source each crate has, plugins and crates with workspaces of their own among them.
pub(crate) fn print_lines() -> Result<bool> {
    let root = Metadata::read()?.workspace_root;
    let mut paths = Vec::new();
    for folder in ["crates", "apps", "plugins"] {
        collect(&root.join(folder), "rs", &mut paths)?;
    }
    let sources: Vec<Source> = paths
        .iter()
        .map(|p| Ok(Source::new(&relative(&root, p), &read(p)?)))
        .collect::<Result<_>>()?;
    print!("{}", lines::table(&sources));
    Ok(true)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// `path` below `root`, with `/`.
fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .replace('\\', "/")
}

/// All Rust files of the members, sorted by path.
fn read_sources(metadata: &Metadata) -> Result<Vec<Source>> {
    let mut paths = Vec::new();
    for package in &metadata.packages {
        collect(package.folder(), "rs", &mut paths)?;
    }
    paths.sort();
    paths.dedup();
    paths
        .iter()
        .map(|p| Ok(Source::new(&relative(&metadata.workspace_root, p), &read(p)?)))
        .collect()
}

/// The documentation, path and text: the files at the root and all of `docs/`.
fn read_documents(root: &Path) -> Result<Vec<(String, String)>> {
    let mut paths: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
        .iter()
        .map(|n| root.join(n))
        .filter(|p| p.exists())
        .collect();
    if root.join("docs").is_dir() {
        collect(&root.join("docs"), "md", &mut paths)?;
    }
    paths.iter().map(|p| Ok((relative(root, p), read(p)?))).collect()
}

/// The READMEs of the crates.
fn readmes(root: &Path) -> Result<Vec<(String, String)>> {
    let beside = manifests(root)?
        .into_iter()
        .map(|path| path.with_file_name("README.md"));
    let readmes = beside.filter(|path| path.exists() && path.parent() != Some(root));
    readmes.map(|p| Ok((relative(root, &p), read(&p)?))).collect()
}

/// Every `Cargo.toml`, those of the workspaces beside the main one too.
fn manifests(root: &Path) -> Result<Vec<PathBuf>> {
    files_named(root, "Cargo.toml")
}

/// Every file of this name below `root`, but for what is built or hidden.
pub(crate) fn files_named(root: &Path, name: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    let extension = Path::new(name).extension().and_then(|e| e.to_str());
    collect(root, extension.unwrap_or_default(), &mut paths)?;
    paths.retain(|path| path.file_name().is_some_and(|n| n == name));
    Ok(paths)
}

/// Every file with this extension below `folder`, sorted.
pub(crate) fn files_below(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    collect(folder, extension, &mut paths)?;
    paths.sort();
    Ok(paths)
}

fn collect(folder: &Path, extension: &str, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, extension, into)?;
            }
        } else if path.extension().is_some_and(|e| e == extension) {
            into.push(path);
        }
    }
    Ok(())
}
