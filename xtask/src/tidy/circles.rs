//! No three files or more of a crate import each other in a circle: they could be read and changed only together. A module and its own
//! submodule may name each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Finding;
use super::lexer::{Source, is_word};

/// A file as a module: its path below the crate.
type Module = Vec<String>;
/// Whom each file imports.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// Checks all sources together, crate by crate.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, BTreeMap<Module, &Source>> = BTreeMap::new();
    for source in sources {
        if let Some((folder, file)) = source.path.split_once("/src/")
            && let Some(module) = module_of(file)
        {
            crates.entry(folder).or_default().insert(module, source);
        }
    }
    let mut findings = Vec::new();
    for mut files in crates.into_values() {
        let tests: Vec<Module> = files.iter().flat_map(|(m, s)| test_modules(m, s)).collect();
        files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
        let imports = imports(&files);
        for circle in circles(&imports) {
            let names: Vec<String> = circle.iter().map(name).collect();
            let path = circle.first().and_then(|m| files.get(m));
            let path = path.map_or("", |s| s.path.as_str());
            let text = format!("these files import each other: {}", names.join(" → "));
            findings.push(Finding::new(path, 0, "circle", text));
        }
    }
    findings
}

fn name(module: &Module) -> String {
    match module.is_empty() {
        true => "the crate's root".to_owned(),
        false => module.join("::"),
    }
}

/// `None` for programs beside the library.
fn module_of(file: &str) -> Option<Module> {
    let stem = file.strip_suffix(".rs")?;
    let mut parts: Module = stem.split('/').map(str::to_owned).collect();
    match parts.last()?.as_str() {
        "mod" => drop(parts.pop()),
        "lib" | "main" if parts.len() == 1 => parts.clear(),
        _ if parts.first().is_some_and(|p| p == "bin") => return None,
        _ => {}
    }
    Some(parts)
}

/// The modules that `source` declares for tests only.
fn test_modules(module: &Module, source: &Source) -> Vec<Module> {
    let mut is_test = false;
    let mut found = Vec::new();
    for line in source.code.lines().map(str::trim) {
        if line.starts_with("#[cfg(") && line.contains("test") {
            is_test = true;
        } else if let Some(name) = line.strip_prefix("mod ").and_then(|l| l.strip_suffix(';')) {
            if std::mem::take(&mut is_test) {
                found.push([module.as_slice(), &[name.to_owned()]].concat());
            }
        } else if !line.starts_with("#[") {
            is_test = false;
        }
    }
    found
}

fn imports(files: &BTreeMap<Module, &Source>) -> Imports {
    let mut imports = Imports::new();
    for (module, source) in files {
        let own = imports.entry(module.clone()).or_default();
        for path in paths(source) {
            let path = absolute(module, &path, files);
            let target = (1..=path.len()).rev().filter_map(|n| path.get(..n));
            let target = target.map(<[String]>::to_vec).find(|t| files.contains_key(t));
            own.extend(target.filter(|t| t != module));
        }
    }
    imports
}

/// What it imports, and the paths from the crate's root that it names.
fn paths(source: &Source) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for at in source.words("use") {
        if source.is_test(source.line_of(at)) {
            continue;
        }
        let rest = source.code.get(at + 3..).unwrap_or_default();
        let tree = rest.split(';').next().unwrap_or_default();
        spread(&[], tree, &mut found);
    }
    for (at, _) in source.code.match_indices("crate::") {
        if is_word(&source.code, at, "crate".len()) && !source.is_test(source.line_of(at)) {
            let rest = source.code.get(at..).unwrap_or_default();
            let end = rest.find(|c: char| c != ':' && c != '_' && !c.is_alphanumeric());
            let path = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
            found.push(segments(path));
        }
    }
    found
}

fn segments(path: &str) -> Vec<String> {
    let path = path.split(" as ").next().unwrap_or_default();
    let parts = path.split("::").map(str::trim).filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

/// `a::{b, c::{d}}` as the paths that it stands for.
fn spread(before: &[String], tree: &str, found: &mut Vec<Vec<String>>) {
    let Some((head, rest)) = tree.split_once('{') else {
        return found.push([before, &segments(tree)].concat());
    };
    let before = [before, &segments(head)].concat();
    let (mut depth, mut begun) = (0, 0);
    for (at, c) in rest.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                spread(&before, rest.get(begun..at).unwrap_or_default(), found);
                begun = at + 1;
                if c == '}' {
                    return;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
}

/// `path` from the crate's root; empty for one that leads elsewhere.
fn absolute(module: &Module, path: &[String], files: &BTreeMap<Module, &Source>) -> Module {
    let Some(first) = path.first() else {
        return Module::new();
    };
    let child = [module.as_slice(), std::slice::from_ref(first)].concat();
    match first.as_str() {
        "crate" => path.iter().skip(1).cloned().collect(),
        "self" => module.iter().chain(path.iter().skip(1)).cloned().collect(),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let base = module.iter().take(module.len().saturating_sub(ups));
            base.chain(path.iter().skip(ups)).cloned().collect()
        }
        _ if files.contains_key(&child) => module.iter().chain(path).cloned().collect(),
        _ => Module::new(),
    }
}

/// The shortest circle of three files or more through each import that is in one; each set of files once.
fn circles(imports: &Imports) -> Vec<Vec<Module>> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (from, targets) in imports {
        for to in targets {
            let Some(back) = way(imports, to, from) else {
                continue;
            };
            let files: BTreeSet<Module> = back.iter().cloned().collect();
            if seen.insert(files) {
                found.push(back);
            }
        }
    }
    found
}

/// The shortest way between two files that is not the import of the one by the other: both and what lies between.
fn way(imports: &Imports, from: &Module, to: &Module) -> Option<Vec<Module>> {
    let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
    let mut next = VecDeque::from([from]);
    while let Some(at) = next.pop_front() {
        for target in imports.get(at)? {
            let is_direct = at == from && target == to;
            if is_direct || target == from || before.contains_key(target) {
                continue;
            }
            before.insert(target, at);
            if target == to {
                let mut way = vec![to.clone()];
                let mut at = to;
                while let Some(earlier) = before.get(at) {
                    way.push((*earlier).clone());
                    at = earlier;
                }
                way.reverse();
                return Some(way);
            }
            next.push_back(target);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> = files
            .iter()
            .map(|(path, text)| Source::new(&format!("crates/x/src/{path}"), text))
            .collect();
        check(&sources).into_iter().map(|f| f.text).collect()
    }

    #[test]
    fn three_files_in_a_circle_are_found_whichever_way_they_import() {
        let circle = found(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;"),
            ("a.rs", "use crate::{b::{B, Other as O}, z};"),
            ("b.rs", "fn f() -> crate::c::C {}"),
            ("c/mod.rs", "use super::a::A;"),
        ]);
        assert_eq!(circle.len(), 1, "{circle:?}");
        assert!(circle[0].contains("b → c → a"), "{circle:?}");
    }

    #[test]
    fn two_files_a_parent_with_its_children_and_tests_may() {
        let none = found(&[
            ("lib.rs", "mod a;\nmod b;\n#[cfg(test)]\nmod tests;"),
            ("a.rs", "mod d;\nuse d::D;\nuse crate::b::B;"),
            ("a/d.rs", "use super::Shared;"),
            (
                "b.rs",
                "use crate::a::A;\n#[cfg(test)]\nmod tests {\n    use crate::tests::T;\n}",
            ),
            ("tests.rs", "use crate::a::A;\nuse crate::b::B;"),
        ]);
        assert!(none.is_empty(), "{none:?}");
    }
}
