//! TransformerEngine: groups of context parallelism for `DotProductAttention`, in Python.

use std::fmt::Write;

use ithaca_import::Mode;

use crate::comment::commented;
use crate::context;
use crate::layout::{Layout, Role};
use crate::order::Permutation;
use crate::rules::{Copies, Rules};
use crate::setting::Settings;

/// The rules of its attention. Groups are the caller's, so any mesh will do.
pub(crate) fn check(rules: &mut Rules<'_>) {
    rules.unsupported();
    rules.keeps_states();
    let decodes = rules.layout.mode == Mode::Decode || rules.layout.cache.is_some();
    rules.refuse(
        decodes,
        || "the plan continues sequences from caches, and context parallelism of TransformerEngine takes whole sequences".to_owned(),
        None,
    );
    rules.tensor_heads(Copies::Allowed);
    context::check(rules);
}

/// The arguments of `set_context_parallel_group`.
pub(crate) fn settings(layout: &Layout, set: &mut Settings) {
    if let Some(kind) = context::comm_type(layout) {
        set.set("cp_comm_type", kind);
        set.set("cp_size", layout.context());
    }
    set.degree("tp_size", layout.tensor());
}

/// A module that makes the groups.
pub(crate) fn text(layout: &Layout, order: &Permutation, notes: &[String]) -> String {
    let mut out = commented(notes, "# ");
    let Some(kind) = context::comm_type(layout) else {
        return out + "# The plan splits no sequence: attention needs no group.\n";
    };
    let groups = |roles: &[Role]| {
        let groups: Vec<String> = order.groups(roles).iter().map(|group| format!("{group:?}")).collect();
        format!("[\n    {},\n]", groups.join(",\n    "))
    };
    let heads = layout.degree(Role::Heads) > 1;
    let tokens = layout.degree(Role::Tokens) > 1;
    out += "import torch\nimport torch.distributed as dist\n\n";
    let _ = writeln!(
        out,
        "# Ranks that split the same sequences.\nCONTEXT = {}",
        groups(&[Role::Heads, Role::Tokens])
    );
    if heads && tokens {
        let _ = writeln!(out, "# Of these, ranks that split heads inside attention, and ranks of a ring.");
        let _ = writeln!(out, "HEADS = {}\nRING = {}", groups(&[Role::Heads]), groups(&[Role::Tokens]));
    }
    out += "\n\ndef group_of(groups):\n    \"\"\"The group of this rank, made by all ranks alike.\"\"\"\n    mine = None\n    for ranks in groups:\n        group = dist.new_group(ranks)\n        if dist.get_rank() in ranks:\n            mine = group, ranks\n    return mine\n\n\ndef set_context_parallel(attentions):\n    \"\"\"Gives the group to every transformer_engine.pytorch.DotProductAttention; tokens are to be dealt in two chunks a rank.\"\"\"\n";
    out += "    group, ranks = group_of(CONTEXT)\n";
    if heads && tokens {
        out += "    group = [group_of(HEADS)[0], group_of(RING)[0]]\n";
    }
    out += "    stream = torch.cuda.Stream()\n    for attention in attentions:\n";
    let _ = writeln!(out, "        attention.set_context_parallel_group(group, ranks, stream, \"{kind}\")");
    out
}
