//! The tree of the crate: `mod.rs` files only declare and re-export, and imports make no circle; nor in the bindings.
//!
//! The compiler allows both. They are kept out because a reader who opens one of two files that need each other has to
//! understand both, and cannot move either.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The code of each module of a crate by its path (`stream::push`; the root is empty), without comments and
/// unit tests.
fn modules(crate_name: &str) -> BTreeMap<String, String> {
    fn read(folder: &Path, path: &[String], modules: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.path().file_stem().unwrap().to_str().unwrap().to_owned();
            let inside = || [path, std::slice::from_ref(&name)].concat();
            if entry.path().is_dir() {
                read(&entry.path(), &inside(), modules);
                continue;
            }
            let module = if name == "mod" || name == "lib" { path.to_vec() } else { inside() };
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let code =
                text.lines().take_while(|line| *line != "#[cfg(test)]").map(|line| line.split("//").next().unwrap());
            modules.insert(module.join("::"), code.collect::<Vec<_>>().join("\n"));
        }
    }
    let mut modules = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(crate_name).join("src"), &[], &mut modules);
    assert!(modules.len() > 10 && modules.contains_key(""));
    modules
}

/// Every path in the code that begins at the root or at the parent, with groups (`super::{a, b::{c}}`) written out.
fn paths(code: &str) -> Vec<String> {
    /// Reads a path, or a group of them, from the front of `rest`.
    fn path(prefix: &str, rest: &mut &str, found: &mut Vec<String>) {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
        let here = format!("{prefix}{}", &rest[..end]);
        *rest = &rest[end..];
        if !rest.starts_with('{') || !here.ends_with("::") {
            found.push(here);
            return;
        }
        while let Some(inside) = rest.strip_prefix(['{', ',']) {
            *rest = inside.trim_start();
            if !rest.starts_with('}') {
                path(&here, rest, found);
            }
            // What it is renamed to does not matter.
            *rest = &rest[rest.find([',', '}']).unwrap_or(rest.len())..];
        }
        *rest = rest.strip_prefix('}').unwrap_or(rest);
    }
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let is_inside_a_path = before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            if !is_inside_a_path && !before.ends_with("pub(in ") {
                path("", &mut &code[at..], &mut found);
            }
        }
    }
    found
}

/// The module that a path leads to, written in `module`: as deep as there are modules.
fn target(module: &str, path: &str, modules: &BTreeMap<String, String>) -> String {
    let mut at: Vec<&str> = module.split("::").filter(|name| !name.is_empty()).collect();
    for name in path.split("::") {
        match name {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            _ => {
                at.push(name);
                if !modules.contains_key(&at.join("::")) {
                    at.pop();
                    break;
                }
            }
        }
    }
    at.join("::")
}

/// What each module imports. Whoever imports from a `mod.rs` depends on all that it re-exports.
fn imports(modules: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<String>> {
    let of = |(module, code): (&'_ String, &String)| {
        let mut to: BTreeSet<String> = paths(code).iter().map(|path| target(module, path, modules)).collect();
        for line in code.lines() {
            if let Some(path) = line.trim_start().strip_prefix("pub").and_then(|rest| rest.split_once("use ")) {
                to.insert(target(module, path.1.trim_end_matches(';'), modules));
            }
        }
        to.remove(module);
        to
    };
    modules.iter().map(|entry| (entry.0.as_str(), of(entry))).collect()
}

/// A circle of modules that import each other, if there is one.
fn circle(imports: &BTreeMap<&str, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit<'a>(
        module: &'a str,
        imports: &'a BTreeMap<&str, BTreeSet<String>>,
        path: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<String>> {
        if let Some(at) = path.iter().position(|&other| other == module) {
            return Some(path[at..].iter().map(|&name| name.to_owned()).collect());
        }
        if !done.contains(module) {
            path.push(module);
            let found = imports[module].iter().find_map(|next| visit(next, imports, path, done));
            path.pop();
            done.insert(module);
            return found;
        }
        None
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|module| visit(module, imports, &mut Vec::new(), &mut done))
}

#[test]
fn no_two_modules_import_each_other() {
    for crate_name in ["wlb-core", "wlb-python"] {
        assert_eq!(circle(&imports(&modules(crate_name))), None, "{crate_name}");
    }
}

#[test]
fn mod_files_only_declare_and_re_export() {
    let modules = modules("wlb-core");
    let is_parent =
        |path: &str| modules.keys().any(|other| other.strip_prefix(path).is_some_and(|rest| rest.starts_with("::")));
    for (path, code) in modules.iter().filter(|(path, _)| path.is_empty() || is_parent(path)) {
        for statement in code.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            let words: Vec<&str> = statement.split_whitespace().filter(|word| !word.starts_with("#![")).collect();
            let declares = words.iter().take(2).any(|word| *word == "mod" || *word == "use");
            assert!(declares, "{path}: {statement:?} belongs into a file of its own");
        }
    }
}

/// The rooms of the crate, and what each may import besides what stands before it.
#[test]
fn rooms_import_only_rooms_below() {
    const ROOMS: [&str; 18] = [
        "limits",
        "error",
        "digest",
        "lengths",
        "longest_first",
        "costliest_first",
        "ladder",
        "cost",
        "forest",
        "balance",
        "packing",
        "ranks",
        "stream",
        "tune",
        "sharding",
        "profile",
        "pipeline",
        "dynamic_cp",
    ];
    let modules = modules("wlb-core");
    let room = |module: &str| {
        let room = module.split("::").next().unwrap().to_owned();
        ROOMS.iter().position(|name| *name == room).expect("every room has its place in ROOMS")
    };
    for (module, targets) in imports(&modules).into_iter().filter(|(module, _)| !module.is_empty()) {
        for other in targets {
            assert!(!other.is_empty() && room(&other) <= room(module), "{module} imports {other}");
        }
    }
}

#[test]
fn finds_what_it_looks_for() {
    let modules = |texts: &[(&str, &str)]| -> BTreeMap<String, String> {
        texts.iter().map(|&(path, code)| (path.to_owned(), code.to_owned())).collect()
    };
    let apart =
        [("", "pub mod a;"), ("a", "mod b;\nmod c;\npub use b::B;"), ("a::b", "use super::c::C;"), ("a::c", "")];
    assert_eq!(circle(&imports(&modules(&apart))), None);
    let from_parent = [("", ""), ("a", "mod b;\npub use b::B;\nstruct C;"), ("a::b", "use super::C;")];
    assert_eq!(circle(&imports(&modules(&from_parent))), Some(vec!["a".to_owned(), "a::b".to_owned()]));
    let in_a_group = [("", ""), ("a", "use crate::{x::Y, b::{self, B}};"), ("b", "fn f() -> crate::a::A {}")];
    assert_eq!(circle(&imports(&modules(&in_a_group))), Some(vec!["a".to_owned(), "b".to_owned()]));
}
