"""The types of parts, blocks, items, tools and tool choices of each API: what is read, shown as text, or refused.

A type of a conversation that is in no list, because it is newer, is shown as text too, and named in a warning.
"""

from typing import NamedTuple


class Kinds(NamedTuple):
    """The types of one place in a body, without dates at their ends. ``dropped``: left out, with a warning."""

    read: tuple[str, ...]
    as_text: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


CHAT_PARTS = Kinds(
    ("text", "refusal", "input_text", "output_text", "thinking"),
    refused=("image_url", "input_audio", "file", "video_url", "audio_url"),
)
CHAT_CALLS = Kinds(("function", "custom"))
CHAT_TOOLS = Kinds(("function",), refused=("custom",))
CHAT_CHOICES = Kinds(("function", "allowed_tools"), refused=("custom",))

RESPONSE_ITEMS = Kinds(
    (
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "item_reference",
    ),
    as_text=(
        "web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call",
        "image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
        "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "program",
        "program_output",
    ),
    dropped=("compaction",),
    refused=("compaction_trigger", "configuration_update"),
)  # fmt: skip
RESPONSE_PARTS = Kinds(
    ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"),
    refused=("input_image", "input_file", "input_audio", "computer_screenshot"),
)
RESPONSE_TOOLS = Kinds(
    ("function", "namespace"),
    dropped=("web_search", "web_search_preview"),
    refused=(
        "custom", "file_search", "computer", "computer_use_preview", "code_interpreter", "image_generation",
        "local_shell", "shell", "apply_patch", "mcp", "tool_search", "programmatic_tool_calling",
    ),
)  # fmt: skip
RESPONSE_CHOICES = Kinds(
    ("function", "allowed_tools"),
    refused=(
        "custom", "file_search", "web_search_preview", "computer", "computer_use",
        "computer_use_preview", "code_interpreter", "image_generation", "shell", "apply_patch", "mcp",
        "programmatic_tool_calling",
    ),
)  # fmt: skip

MESSAGE_BLOCKS = Kinds(
    ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    as_text=(
        "search_result", "document", "tool_reference", "server_tool_use", "web_search_tool_result",
        "web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "advisor_tool_result", "mcp_tool_use",
        "mcp_tool_result", "mcp_tool_listing", "container_upload", "compaction", "browser_state", "tool_addition",
        "tool_removal", "fallback",
    ),
    refused=("image",),
)  # fmt: skip
DOCUMENT_SOURCES = Kinds(("text", "content"), refused=("base64", "url", "file"))
MESSAGE_TOOLS = Kinds(
    ("custom",),
    refused=(
        "advisor", "bash", "browser_toolset", "code_execution", "computer", "computer_toolset", "mcp_toolset", "memory",
        "text_editor", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search",
    ),
)  # fmt: skip
MESSAGE_CHOICES = Kinds(("auto", "any", "tool", "none"))

KINDS: dict[str, Kinds] = {
    "chat: parts of messages": CHAT_PARTS,
    "chat: tool calls": CHAT_CALLS,
    "chat: tools": CHAT_TOOLS,
    "chat: tool choices": CHAT_CHOICES,
    "responses: items": RESPONSE_ITEMS,
    "responses: parts of items": RESPONSE_PARTS,
    "responses: tools": RESPONSE_TOOLS,
    "responses: tool choices": RESPONSE_CHOICES,
    "messages: blocks": MESSAGE_BLOCKS,
    "messages: sources of documents": DOCUMENT_SOURCES,
    "messages: tools": MESSAGE_TOOLS,
    "messages: tool choices": MESSAGE_CHOICES,
}
"""All of them, for the reference page."""
