"""Who sends a request and what the caller may use.

api_keys  API keys, the Principal of a request, authorization for models
jwks      the public keys of an OIDC issuer: fetched, cached, refreshed
jwt       verification of JSON Web Tokens
"""
