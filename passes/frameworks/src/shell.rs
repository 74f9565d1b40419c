//! Command lines, a setting a line.

use crate::comment::Subject;
use crate::layout::Layout;
use crate::setting::{Setting, words};

/// `torchrun` for the ranks of a layout, node after node; the last node has the rest.
pub(crate) fn torchrun(layout: &Layout, subject: &Subject) -> String {
    let ranks = layout.ranks();
    let each = subject.node.clamp(1, ranks.max(1));
    let processes = match ranks % each {
        0 => each.to_string(),
        rest => format!("\"$((NODE_RANK < {} ? {each} : {rest}))\"", ranks / each),
    };
    match ranks.div_ceil(each) {
        1 => format!("torchrun --nproc-per-node {each}"),
        nodes => format!(
            "torchrun --nproc-per-node {processes} --nnodes {nodes} --node-rank \"$NODE_RANK\" --master-addr \"$MASTER_ADDR\" --master-port \
             \"$MASTER_PORT\""
        ),
    }
}

/// A command with the words of settings, several in a line, and the arguments of the script last.
pub(crate) fn command(head: &str, groups: &[&[Setting]]) -> String {
    const WIDTH: usize = 100;
    let mut lines = vec![head.to_owned()];
    for group in groups {
        let mut line = String::new();
        for word in words(group) {
            if !line.is_empty() && line.len() + 1 + word.len() > WIDTH {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += &word;
        }
        lines.extend(Some(line).filter(|line| !line.is_empty()));
    }
    lines.push("\"$@\"".to_owned());
    lines.join(" \\\n    ") + "\n"
}
